"""One budget for units that are planned apart: chosen exactly, kept by a real step, and nothing else disturbed."""

from __future__ import annotations

import copy
import os
import re
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import remat
from client.small_models import numbers
from remat.errors import CaptureError
from remat.planning.budget import UnitBytes, bounded, bytes_of
from remat.planning.division import Option, Place, allot, least_budget, peak_of
from remat.planning.greedy import greedy_answer
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.sources import GreedyPlanner
from remat.profiling import measure
from remat.training.enable import plans_of
from remat.training.step import training_step
from remat.units.units import optimize_units
from remat_ir import Answer, InvalidData, Plan, Problem, budget_at, plain_plan, replay, verify
from remat_ir.greedy import checkpointed


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


few = st.integers(0, 6)
options = st.builds(Option, few, few, few, few)
place = st.builds(Place, st.integers(-2, 4), st.integers(-2, 4), few)


@given(
    st.lists(st.tuples(place, st.lists(options, min_size=1, max_size=4)), min_size=1, max_size=4), st.integers(0, 30)
)
def test_no_other_choice_costs_less(units: list[tuple[Place, list[Option]]], budget: int) -> None:
    """Against all choices."""
    places, ways = [p for p, _ in units], [w for _, w in units]
    fitting = [c for c in product(*ways) if peak_of(0, places, c) <= budget]
    found = allot(places, ways, budget)
    assert (found is None) == (not fitting)
    if found is not None:
        chosen = [w[i] for w, i in zip(ways, found, strict=True)]
        assert peak_of(0, places, chosen) <= budget
        assert sum(o.cost_ns for o in chosen) == min(sum(o.cost_ns for o in c) for c in fitting)
    least = least_budget(0, places, ways)
    assert allot(places, ways, least) is not None
    assert least <= min(peak_of(0, places, c) for c in product(*ways)) + 1


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
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Counting(GreedyPlanner):
    """How often it was asked."""

    def __init__(self) -> None:
        self.asked: list[Problem] = []

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: object = None) -> Answer:
        self.asked.append(problem)
        return super().plan(problem)


def peak_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Of a real step, above what was there before it; the second, since libraries keep what the first one allocates."""
    for _ in range(2):
        model.zero_grad()
        found = measure.peak_memory(measure.forward_backward(model, (x,))).peak_bytes
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
        assert isinstance(plan, Plan)
        assert held(plan) <= bound
        verify(Problem(graph, problem.budget_bytes), plan)
    trained = remat.optimize(Block(32), (numbers(256, 32),), budget=UnitBytes(peak, least), planner="greedy")
    planned = remat.plans_of(trained).plan_for((numbers(256, 32),))
    assert planned is not None
    assert isinstance(planned.answer.plan, Plan)
    assert held(planned.answer.plan) <= least


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_a_real_step_keeps_to_the_budget_of_the_whole(share: float) -> None:
    """Its peak by the allocator's events, gradients as without a plan, and one solve for blocks that are the same."""
    x, plain, model, planner = numbers(256, 32), Model(), Model(), Counting()
    budget = int(share * peak_bytes(plain, x))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    found = optimize_units(model, model.blocks, (x,), budget=remat.ActivationBytes(budget), planner=planner)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert found.measured_bytes <= found.budget_bytes == found.fixed_bytes + budget
    assert abs(found.predicted_bytes - found.measured_bytes) <= 0.01 * found.measured_bytes
    assert list(found.units) == [f"blocks.{i}" for i in range(4)]
    assert found.distinct == 1
    assert found.solves == len(planner.asked) <= 4
    assert found.overhead > 0
    plain.load_state_dict(before)
    one, other = (measure.outcome(m, measure.forward_backward(m, (x,))) for m in (plain, model))
    assert measure.differences(one, other) == []
    assert peak_bytes(model, x) <= budget


def test_more_memory_never_costs_more_and_all_of_it_costs_nothing() -> None:
    x = numbers(256, 32)
    overheads = []
    for share in (0.5, 0.75, 1.0):
        model = Model()
        found = optimize_units(model, model.blocks, (x,), budget=remat.Fraction(share), planner="greedy")
        overheads.append(found.overhead)
    assert overheads[0] > overheads[1] > overheads[2] == 0


def test_a_budget_that_no_choice_fits_names_one_that_does() -> None:
    x, model = numbers(256, 32), Model(2)
    with pytest.raises(remat.BudgetTooSmall, match="is enough") as caught:
        optimize_units(model, model.blocks, (x,), budget=remat.ActivationBytes(1000), planner="greedy")
    least = re.search(r"; ([0-9.]+ [KM]iB) is enough", str(caught.value))[1]
    with pytest.raises(RuntimeError, match="not enabled"):
        plans_of(model.blocks[0])
    found = optimize_units(model, model.blocks, (x,), budget=least, planner="greedy")
    assert found.measured_bytes <= bytes_of(least)


@pytest.mark.thorough
def test_another_size_is_planned_within_what_its_unit_has() -> None:
    model = Model(2)
    found = optimize_units(model, model.blocks, (numbers(256, 32),), budget=remat.Fraction(0.6), planner="greedy")
    peak_bytes(model, numbers(128, 32))
    for name, block in model.blocks.named_children():
        plans = list(plans_of(block).plans)
        assert len(plans) == 2
        small = plans[1]
        assert small is not None
        size = found.units[f"blocks.{name}"]
        room = small.step.graph.fixed_bytes + bytes_of(size.peak)
        assert isinstance(small.answer.plan, Plan)
        verify(Problem(bounded(small.step.graph, size), room), small.answer.plan)


@pytest.mark.thorough
def test_what_cannot_be_units_is_said() -> None:
    x, model = numbers(8, 32), Model(2)

    def optimize(*units: nn.Module, of: nn.Module = model) -> None:
        optimize_units(of, units, (x,), budget=remat.Fraction(1), planner="greedy")

    with pytest.raises(InvalidData, match="unit 0, a Linear, is no part of this Model"):
        optimize(nn.Linear(2, 2))
    with pytest.raises(InvalidData, match="no units"):
        optimize()
    with pytest.raises(InvalidData, match=r"blocks.0.wide is a part of blocks.0"):
        optimize(model.blocks[0], model.blocks[0].wide)
    twice = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), Summed())
    twice = nn.Sequential(twice[0], twice[0], twice[2])
    with pytest.raises(CaptureError, match="0 runs twice in one step"):
        optimize(twice[0], of=twice)
    idle = Model(2)
    idle.extra = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="extra does not run forward and backward"):
        optimize(idle.extra, of=idle)
    for module in (*model.blocks, twice[0], idle.extra):
        with pytest.raises(RuntimeError, match="not enabled"):
            plans_of(module)
    with pytest.raises(InvalidData, match="the budget of a whole model is bytes"):
        optimize_units(model, model.blocks, (x,), budget=UnitBytes(1, 1), planner="greedy")


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


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

    def peak(of: nn.Module) -> int:
        for _ in range(2):
            of.zero_grad()
            found = measure.peak_memory(measure.forward_backward(of, (), batch)).peak_bytes
        return found

    budget = peak(plain) // 2
    blocks = planned.transformer.h
    found = optimize_units(
        planned,
        blocks,
        (),
        batch,
        budget=remat.ActivationBytes(budget),
        planner="local",
        time_limit_s=3.0,
    )
    assert found.distinct == 1
    assert 0 < found.overhead < 0.25
    assert peak(planned) <= budget
    one, other = (measure.outcome(m, measure.forward_backward(m, (), batch)) for m in (plain, planned))
    assert measure.differences(one, other) == []
