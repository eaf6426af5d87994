"""One budget for the modules of a list, planned apart: chosen exactly, and held by a real step."""

from __future__ import annotations

import copy
import gc
import os
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import remat
from client.comparing import equal, gradients, step_differences
from client.planners import Noting
from client.small_models import numbers
from remat.compile.shared import Division
from remat.planning.budget import Budget, UnitBytes, bounded, bytes_of
from remat.planning.division import Option, Place, allot
from remat.planning.greedy import greedy_answer
from remat.profiling import measure
from remat.trainers import PlannedRuns
from remat.training.enable import backend_of, plans_of
from remat.training.step import training_step
from remat_ir import InvalidData, Plan, Problem, budget_at, plain_plan, problem_digest, replay, verify
from remat_ir.greedy import checkpointed


@pytest.fixture(autouse=True)
def alone() -> None:
    """What an earlier test has left is not freed while a step is watched."""
    torch._dynamo.reset()
    gc.collect()


few = st.integers(0, 6)
options = st.builds(Option, few, few, few, few)
place = st.builds(Place, st.integers(-2, 4), st.integers(-2, 4), few)


def peak_of(places: Sequence[Place], chosen: Sequence[Option]) -> int:
    """While each unit runs, and after it."""
    held, worst = 0, 0
    for at, option in zip(places, chosen, strict=True):
        running = max(at.forward_bytes + option.forward_bytes, at.backward_bytes + option.backward_bytes)
        held, worst = held + option.held_bytes, max(worst, held + running)
        worst = max(worst, held + at.after_bytes)
    return worst


@given(
    st.lists(st.tuples(place, st.lists(options, min_size=1, max_size=4)), min_size=1, max_size=4), st.integers(0, 30)
)
def test_no_other_choice_costs_less(units: list[tuple[Place, list[Option]]], budget: int) -> None:
    """Against all choices."""
    places, ways = [p for p, _ in units], [w for _, w in units]
    fitting = [c for c in product(*ways) if peak_of(places, c) <= budget]
    found = allot(places, ways, budget)
    assert (found is None) == (not fitting)
    if found is not None:
        chosen = [w[i] for w, i in zip(ways, found, strict=True)]
        assert peak_of(places, chosen) <= budget
        assert sum(o.cost_ns for o in chosen) == min(sum(o.cost_ns for o in c) for c in fitting)


class Block(nn.Module):
    """Two layers, dropout and a count of calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(1))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(x))))


class Model(nn.Module):
    """Blocks between two layers that belong to none."""

    def __init__(self, count: int = 4, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def peak_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Of a real step, above what was there before it; the second, since libraries keep what the first one allocates."""
    for _ in range(2):
        model.zero_grad()
        found = measure.peak_memory(measure.forward_backward(model, args, kwargs)).peak_bytes
    model.zero_grad()
    return found


@pytest.mark.thorough
def test_a_bound_on_what_is_held_is_kept() -> None:
    """By the greedy plan and by the one that holds least; without the bound more is held at this peak."""
    step = training_step(Block(32), (numbers(256, 32),), {})
    graph = step.graph

    def held(plan: Plan) -> int:
        moment = next(m for m in replay(graph, plan) if m.op == graph.backward_from)
        return (
            moment.peak_bytes - graph.fixed_bytes - sum(graph.value_bytes[v] for v in graph.op_always[moment.op or 0])
        )

    peak = budget_at(graph, 1) - graph.fixed_bytes
    least, most = held(checkpointed(graph)), held(plain_plan(graph))
    assert least < most
    for bound in (least, (least + most) // 2):
        problem = Problem(bounded(graph, UnitBytes(peak, bound)), graph.fixed_bytes + peak)
        plan = greedy_answer(problem).plan
        assert held(plan) <= bound
        verify(Problem(graph, problem.budget_bytes), plan)
    trained = remat.optimize(Block(32), (numbers(256, 32),), budget=UnitBytes(peak, least), planner="greedy")
    planned = remat.plans_of(trained).plan_for((numbers(256, 32),))
    assert held(planned.answer.plan) <= least


def divided(blocks: nn.ModuleList, step: Callable[[], object], budget: Budget, **given: Any) -> Division:
    """Enable the blocks, and train until their budget has been divided."""
    remat.enable(blocks, budget=budget, **given)
    for _ in range(5):
        blocks.zero_grad()
        step()
    found = backend_of(blocks[0]).division
    assert found is not None
    return found


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_a_real_step_keeps_to_the_budget_of_the_whole(share: float) -> None:
    """Its peak by the allocator's events, gradients as without a plan, and one solve for blocks that are the same."""
    x, plain, model, planner = numbers(256, 32), Model(), Model(), Noting()
    budget = int(share * peak_bytes(plain, x))
    found = divided(model.blocks, lambda: model(x).backward(), remat.ActivationBytes(budget), planner=planner)
    assert found.calls == 4
    assert found.predicted_bytes <= found.allowed_bytes == budget
    assert found.overhead > 0
    assert 0 < len(planner.problems) <= len({problem_digest(problem) for problem in planner.problems})
    plain.load_state_dict(model.state_dict())
    assert step_differences(plain, model, (x,)) == []
    measured = peak_bytes(model, x)
    assert measured == pytest.approx(found.predicted_bytes, rel=0.03)
    assert measured <= budget


def test_more_memory_never_costs_more_and_all_of_it_costs_nothing() -> None:
    x = numbers(256, 32)
    overheads = []
    for share in (0.5, 0.75, 1.0):
        model = Model()
        found = divided(model.blocks, lambda model=model: model(x).backward(), remat.Fraction(share), planner="greedy")
        overheads.append(found.overhead)
    assert overheads[0] > overheads[1] > overheads[2] == 0


def test_a_budget_that_no_choice_fits_names_one_that_does() -> None:
    """By what was seen: a CPU's allocator may tell a little less in one step than in the next one."""
    x, budget = numbers(256, 32), "1000B"
    for _ in range(3):
        model = Model(2)
        try:
            found = divided(model.blocks, lambda model=model: model(x).backward(), budget, planner="greedy")
            break
        except remat.BudgetTooSmall as error:
            said = re.search(r"; ([0-9.]+ [KM]iB) is enough", str(error))
            assert bytes_of(said[1]) > bytes_of(budget)
            budget = said[1]
            remat.disable(model.blocks)
            with pytest.raises(RuntimeError, match="not enabled"):
                plans_of(model.blocks[0])
    assert budget != "1000B"
    assert found.fixed_bytes + found.predicted_bytes <= bytes_of(budget)


@pytest.mark.thorough
def test_another_size_is_planned_within_what_is_left() -> None:
    """Its calls run by the plans that hold least, until a step of them has been watched."""
    model, sizes = Model(2), (numbers(256, 32), numbers(128, 32))
    budget = int(0.6 * peak_bytes(Model(2), sizes[0]))

    def steps() -> None:
        for x in sizes:
            model(x).backward()
            model.zero_grad()

    found = divided(model.blocks, steps, remat.ActivationBytes(budget), planner="greedy")
    assert found.calls == 4
    for x in sizes:
        assert peak_bytes(model, x) <= budget


def test_what_cannot_share_a_budget_is_said() -> None:
    model = Model(2)
    with pytest.raises(InvalidData, match="no modules in this ModuleList"):
        remat.enable(nn.ModuleList(), budget="50%")
    with pytest.raises(InvalidData, match="the budget of several modules is bytes or a share"):
        remat.enable(model.blocks, budget=UnitBytes(1, 1))
    with pytest.raises(InvalidData, match=r"takes an nn\.Sequential"):
        remat.enable(model.blocks, budget="50%", mode="chain")
    remat.enable(model.blocks[1], budget="50%", planner="greedy")
    with pytest.raises(RuntimeError, match="enabled on this Block already"):
        remat.enable(model.blocks, budget="50%", planner="greedy")
    with pytest.raises(RuntimeError, match="not enabled"):
        plans_of(model.blocks[0])


@pytest.mark.thorough
def test_a_block_that_runs_twice_and_one_that_never_runs_share_as_well() -> None:
    """Each call is one of the step; what does not run holds nothing."""
    model, plain, x = Model(3), Model(3), numbers(256, 32)
    for each in (model, plain):
        each.blocks[1] = each.blocks[0]

    def step(of: nn.Module) -> None:
        torch.manual_seed(1)
        of(x).backward()

    idle = Block(32)
    found = divided(nn.ModuleList([*dict.fromkeys(model.blocks), idle]), lambda: step(model), remat.Fraction(0.6))
    assert found.calls == 3
    model.zero_grad()
    step(model), step(plain)
    assert equal(gradients(model), gradients(plain))


def test_a_module_that_is_in_a_list_twice_is_enabled_once() -> None:
    """Such as layers that share their parameters: each of its calls has a plan."""
    model, x = Model(3), numbers(256, 32)
    model.blocks[1] = model.blocks[0]
    found = divided(model.blocks, lambda: model(x).backward(), remat.Fraction(1.0), planner="greedy")
    assert found.calls == 3
    assert plans_of(model.blocks[0]).calls == (10, 0)
    remat.disable(model.blocks)
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_plan_file_has_all_of_a_shared_budget(tmp_path: Path) -> None:
    """A job that starts from the file divides nothing anew."""
    model, x = Model(2), numbers(256, 32)
    found = divided(model.blocks, lambda: model(x).backward(), remat.Fraction(0.6), planner="greedy")
    remat.save_plans(model.blocks, tmp_path / "plan.json")
    with pytest.raises(RuntimeError, match="not enabled on this ModuleList itself: each of its modules has plans"):
        plans_of(model.blocks)
    again = Model(2)
    remat.enable(again.blocks, plan=tmp_path / "plan.json")
    for _ in range(4):
        again.zero_grad()
        again(x).backward()
    division = backend_of(again.blocks[1]).division
    assert division.overhead == pytest.approx(found.overhead, abs=0.05)


def test_copies_of_blocks_share_a_budget_of_their_own() -> None:
    """Such as those of an EMA: what the blocks of the original share counts no parameter of a copy."""
    model, x = Model(2), numbers(256, 32)
    divided(model.blocks, lambda: model(x).backward(), remat.Fraction(0.6), planner="greedy")
    copied = copy.deepcopy(model)
    one, other = backend_of(model.blocks[0]).shared, backend_of(copied.blocks[0]).shared
    assert other is not one
    assert backend_of(copied.blocks[1]).shared is other
    assert [set(shared.backends) for shared in (one, other)] == [set(model.blocks), set(copied.blocks)]
    assert (other.several, other.division) == (True, None)
    for _ in range(5):
        copied.zero_grad()
        copied(x).backward()
    assert backend_of(copied.blocks[1]).division is not None


class Runs(PlannedRuns):
    """As the callbacks of the trainers are, of none."""

    kind = "none"


def test_a_trainers_callback_takes_a_list_for_its_part() -> None:
    """What a run has left that ended by an exception is undone first; at the end nothing is enabled."""
    model, runs = Model(2), Runs("60%", planner="greedy")
    for _ in range(2):
        runs.begin(model.blocks, None, accumulate=1, clips=False)
        model(numbers(64, 32)).backward()
        assert [plans_of(block).calls for block in model.blocks] == [(1, 0), (1, 0)]
    runs.leave()
    for block in model.blocks:
        with pytest.raises(RuntimeError, match="not enabled"):
            plans_of(block)


@pytest.mark.slow
def test_blocks_of_a_transformer_share_one_budget() -> None:
    """GPT-2 with dropout, from its config: half of plain training's activations, head and loss included."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel

    def model() -> nn.Module:
        torch.manual_seed(0)
        config = GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=200, n_positions=128)
        config.bos_token_id = config.eos_token_id = 1
        config.use_cache, config.loss_type = False, "ForCausalLM"
        return GPT2LMHeadModel(config)

    tokens = torch.randint(0, 200, (4, 128), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    plain, planned = model(), model()
    budget = remat.ActivationBytes(peak_bytes(plain, **batch) // 2)
    step = measure.forward_backward(planned, (), batch)
    found = divided(planned.transformer.h, step, budget, planner="local", time_limit_s=3.0)
    assert found.calls == 4
    assert 0 < found.overhead < 0.25
    assert peak_bytes(planned, **batch) <= budget.size
    one, other = (measure.outcome(m, measure.forward_backward(m, (), batch)) for m in (plain, planned))
    assert measure.differences(one, other) == []
