"""Reserved bytes: what the model of the allocator predicts, and rehearsals did, next to what the stand-in reserves.

Budgets of steps, chains, joins, blocks, the largest batch and pipelines hold for what the driver has to give.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.small_models import Case, numbers
from client.test_chain_training import MeanSquare
from client.test_exact import callable_of, everything_again, random_plan
from client.transferring import linked, with_transfers
from remat.device import of
from remat.lowering.allocator import Allocator, Settings
from remat.planning.coordinator import Coordinator
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.profiling.room import STEPS, Room
from remat.training.enable import backend_of
from remat.training.job import Job
from remat.training.memory import StepRoom, reserved
from remat.training.step import TrainingStep, training_step
from remat_ir import Answer, Offload, Plan, Problem, plain_plan, readable
from standin import device
from standin.module import CONTEXT_BYTES
from standin.movable import ALL, DEVICE, MIB, subject, with_loss
from standin.test_cuda import Wide

pytestmark = pytest.mark.standin


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("expandable", [False, True])
def test_any_sequence_of_requests_reserves_the_same(seed: int, expandable: bool) -> None:
    draw, held = random.Random(seed), []
    largest = draw.choice((2**16, 2 * MIB, 24 * MIB, 64 * MIB))
    with device.expandable_segments() if expandable else device.lazy_streams(True):
        device.empty_cache()
        model = Allocator(Settings(expandable=expandable), device.segments(device.SPARE))
        for _ in range(300):
            if held and draw.random() < 0.45:
                block, address = held.pop(draw.randrange(len(held)))
                model.free(block)
                device.release(address)
            else:
                size = draw.randint(1, largest) if draw.random() < 0.7 else draw.randint(1, 2**18)
                held.append((model.allocate(size), device.allocate(size)))
            now = device.figures(device.SPARE)
            assert model.now == (now.requested, now.allocated, now.reserved)
        for _, address in held:
            device.release(address)


@pytest.mark.parametrize("name", ALL)
def test_training_reserves_what_was_predicted(name: str, profiles: DiskProfiles) -> None:
    whole = with_loss(subject(name))
    step = training_step(whole.module, whole.args, whole.kwargs, table=profiles)
    # values of vgg all but fill a segment of small blocks: with one request in another order these plans need one more
    seeds = (1, 5, 17) if name == "vgg" else (1,)
    for plan in (plain_plan(step.graph), everything_again(step), *(random_plan(step, seed) for seed in seeds)):
        trained_as_predicted(whole, step, plan)


def trained_as_predicted(whole: Case, step: TrainingStep, plan: Plan) -> int:
    """The reserved bytes of a few steps with AdamW, which are those that were predicted."""
    there = of(DEVICE)
    run = measure.forward_backward(callable_of(whole, step, plan), whole.args, whole.kwargs)
    whole.module.zero_grad()
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(whole.module.parameters())
    before = Allocator(Settings.of_process(), there.segments())
    predicted = reserved(step, plan, before, Job(optimizer))
    there.reset_peaks()
    for _ in range(STEPS):
        run()
        optimizer.step()
        optimizer.zero_grad()
    seen = there.memory()
    del optimizer
    assert predicted.reserved == pytest.approx(seen.peak_reserved, rel=0.01)
    # the optimizer has no state of a parameter without a gradient, of which one case has some
    assert predicted.allocated == pytest.approx(seen.peak_allocated, rel=0.01, abs=16384)
    return seen.peak_reserved


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ["attention_with_dropout", "batch_norm_and_dropout", "wasteful"])
def test_transfers_reserve_what_was_predicted(name: str, lazy: bool, profiles: DiskProfiles) -> None:
    """However late the copies run: blocks go back on the computing stream, behind its wait for them."""
    case = Case(wasteful(), (torch.randn(4096, 96, device=DEVICE),), {}, None)
    whole = with_loss(case if name == "wasteful" else subject(name))
    step = linked(training_step(whole.module, whole.args, whole.kwargs, table=profiles))
    plain = plain_plan(step.graph)
    plans = [with_transfers(step.graph, plain, seed, share=1.0) for seed in (None, 1)]
    plans.append(with_transfers(step.graph, everything_again(step), 2, share=1.0))
    with device.lazy_streams(lazy):
        most = trained_as_predicted(whole, step, plain)
        found = [trained_as_predicted(whole, step, plan) for plan in plans]
    assert all(any(isinstance(part, Offload) for part in plan.steps) for plan in plans)
    if name == "wasteful":  # the values of the others fit in a segment or two
        assert found[0] < 0.7 * most


def test_a_budget_holds_for_what_the_driver_has_to_give() -> None:
    """The context, the rounding of segments and another model count; what is predicted is what is reserved."""
    torch.manual_seed(0)
    other = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
    model, x = wasteful(), torch.randn(8192, 96, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    there = of(DEVICE)
    assert there.outside_bytes() == CONTEXT_BYTES
    plain = remat.optimize(copy.deepcopy(model), (x,), budget=2**40, planner="greedy", optimizer=optimizer)
    (unbounded,) = remat.plans_of(plain).plans
    del plain
    budget = CONTEXT_BYTES + unbounded.memory.reserved - 60 * MIB
    by_plan = remat.optimize(model, (x,), budget=budget, planner="greedy", optimizer=optimizer)
    (planned,) = remat.plans_of(by_plan).plans
    assert planned.answer.overhead
    assert planned.memory.reserved + CONTEXT_BYTES <= budget
    assert planned.answer.budget_bytes < planned.memory.allocated < planned.memory.reserved
    with device.limited(budget - CONTEXT_BYTES):
        seen = trained(lambda: by_plan(x).backward(), optimizer, steps=4)
    assert seen == pytest.approx(planned.memory.reserved, rel=0.01)
    assert f"{readable(planned.memory.reserved)} reserved" in str(remat.explain(by_plan))
    device.empty_cache()
    del other


class Hearing(Coordinator):
    """Keeps the budgets for which all ranks were to have one answer."""

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def answer(self, problem: Problem, ask: Callable[[], Answer]) -> Answer:
        """What `ask` gives."""
        self.budgets.append(problem.budget_bytes)
        return ask()


def test_ranks_lower_a_budget_by_the_same_quick_plans(profiles: DiskProfiles) -> None:
    """Each rank's own walks are cut short by its clock, and the ranks would then pose different problems."""
    model, x, ranks = wasteful(), torch.randn(8192, 96, device=DEVICE), Hearing()
    step = training_step(model, (x,), {}, table=profiles)
    start = Allocator(Settings.of_process(), of(DEVICE).segments())
    budget = CONTEXT_BYTES + reserved(step, plain_plan(step.graph), start, Job()).reserved - 60 * MIB
    found = StepRoom(step, budget, 1.0, Job(), 0, ranks).planned(Problem(step.graph, budget))
    assert found.budget_bytes in ranks.budgets


def test_a_budget_below_what_others_hold_is_too_small() -> None:
    model, x = Wide().to(DEVICE), torch.randn(64, 256).to(DEVICE)
    with pytest.raises(remat.BudgetTooSmall):
        remat.optimize(model, (x,), budget=CONTEXT_BYTES + MIB, planner="greedy")


class Wave(nn.Module):
    """Values of 3 MiB or of 7 MiB in turn, from 8192 rows: six of the one or two of the other leave some of 20 MiB."""

    def __init__(self, *sides: int) -> None:
        super().__init__()
        self.layer = nn.Linear(*sides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(x)).exp().sin()


def waves(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Wave(*((96, 224) if i % 2 == 0 else (224, 96))).to(DEVICE) for i in range(count)]


def wasteful() -> nn.Module:
    return nn.Sequential(*waves(8), MeanSquare())


class Blocks(nn.Module):
    """Waves in pairs, as units."""

    def __init__(self) -> None:
        super().__init__()
        found = waves(4)
        self.blocks = nn.ModuleList(nn.Sequential(*found[i : i + 2]) for i in range(0, len(found), 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Meeting(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left * right).square().mean()


def trained(run: Callable[[], Any], optimizer: Any, *, clears: bool = True, steps: int = STEPS) -> int:
    """The reserved bytes of some steps from an empty cache."""
    there = of(DEVICE)
    device.empty_cache()
    there.reset_peaks()
    for _ in range(steps):
        run()
        optimizer.step()
        optimizer.zero_grad(set_to_none=clears)
    return there.memory().peak_reserved


def rows() -> torch.Tensor:
    return numbers(8192, 96).to(DEVICE)


def chained(modules: list[nn.Module], x: torch.Tensor, budget: int, optimizer: Any) -> Any:
    return remat.optimize_chain(modules, x, budget=budget, planner="greedy", optimizer=optimizer)


def test_a_chain_reserves_what_its_rehearsal_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model counts, and so do the context and the state that the optimizer will make."""
    other = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
    modules, x = [*waves(6), MeanSquare()], rows()
    parameters = [p for module in modules for p in module.parameters()]
    plain = trained(measure.forward_backward(nn.Sequential(*modules), (x,)), torch.optim.SGD(parameters, 0.0))
    before, optimizer = [p.detach().clone() for p in parameters], torch.optim.AdamW(parameters)
    budget = CONTEXT_BYTES + plain - 20 * MIB
    model = chained(modules, x, budget, optimizer)
    assert CONTEXT_BYTES + model.reserved_bytes <= budget
    assert not optimizer.state
    assert all(p.grad is None for p in parameters)
    assert all(map(torch.equal, before, parameters))
    with device.limited(budget - CONTEXT_BYTES):
        seen = trained(measure.forward_backward(model, (x,)), optimizer, clears=False)
        assert seen == pytest.approx(model.reserved_bytes, rel=0.01)
        optimizer.zero_grad()
        assert trained(measure.forward_backward(model, (x,)), optimizer, steps=2) <= model.reserved_bytes
        optimizer.zero_grad()
        monkeypatch.setattr(Room, "over", lambda self, reserved: 0)
        bold = chained(modules, x, budget, optimizer)
        assert bold.answer.budget_bytes > model.answer.budget_bytes
        with pytest.raises(RuntimeError, match="out of memory"):
            trained(measure.forward_backward(bold, (x,)), optimizer, clears=False)
    del other


def test_the_memory_of_a_rehearsal_may_end() -> None:
    """A budget over what the device has: less is planned for, until the steps fit."""
    modules, x = [*waves(6), MeanSquare()], rows()
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()])
    plain = trained(measure.forward_backward(nn.Sequential(*modules), (x,)), optimizer)
    with device.limited(plain - 20 * MIB):
        model = chained(modules, x, CONTEXT_BYTES + plain, optimizer)
        trained(measure.forward_backward(model, (x,)), optimizer, clears=False)


def test_a_join_reserves_what_its_rehearsal_did() -> None:
    tower, x = waves(2), rows()
    optimizer = torch.optim.AdamW([p for module in tower for p in module.parameters()])

    def joined(budget: int) -> Any:
        return remat.optimize_chain(
            (tower, tower), (x, x.neg()), head=Meeting(), budget=budget, planner="greedy", optimizer=optimizer
        )

    budget = CONTEXT_BYTES + joined(2**40).reserved_bytes - 20 * MIB
    model = joined(budget)
    assert CONTEXT_BYTES + model.reserved_bytes <= budget
    seen = trained(measure.forward_backward(model, (x, x.neg())), optimizer, clears=False)
    assert seen == pytest.approx(model.reserved_bytes, rel=0.01)


def test_blocks_that_share_a_budget_reserve_no_more() -> None:
    """What steps by the plans reserve counts: the budget is divided again for less, until it is within."""
    model, x = Blocks(), rows()
    plain = trained(measure.forward_backward(model, (x,)), torch.optim.SGD(model.parameters(), 0.0))
    optimizer = torch.optim.AdamW(model.parameters())
    budget = CONTEXT_BYTES + plain - 20 * MIB
    remat.enable(model.blocks, budget=budget, planner="greedy", optimizer=optimizer)
    trained(measure.forward_backward(model, (x,)), optimizer, steps=12)
    found = backend_of(model.blocks[0]).division
    assert found.overhead > 0
    with device.limited(budget - CONTEXT_BYTES):
        assert trained(measure.forward_backward(model, (x,)), optimizer) + CONTEXT_BYTES <= budget


def test_the_largest_batch_is_one_of_what_the_driver_gives() -> None:
    budget = CONTEXT_BYTES + 90 * MIB
    model = Wide(2, 64, 256).to(DEVICE)
    found = remat.max_batch(
        lambda: model,
        lambda batch: numbers(batch, 64).to(DEVICE),
        budget,
        0.4,
        planner="greedy",
        make_optimizer=lambda made: torch.optim.AdamW(made.parameters()),
        multiple_of=512,
        limit=20480,
        precision=0.1,
        most_tries=4,
        time_limit_s=1,
    )
    assert found.measured_bytes <= budget == found.budget_bytes
    for tried in found.tries:
        if tried.measured_bytes is None:
            continue
        assert tried.predicted_bytes == pytest.approx(tried.measured_bytes, rel=0.01)
    x, optimizer = numbers(found.batch, 64).to(DEVICE), torch.optim.AdamW(model.parameters())
    with device.limited(budget - CONTEXT_BYTES):
        planned = remat.optimize(model, (x,), budget=budget, planner="greedy", optimizer=optimizer)
        seen = trained(measure.forward_backward(planned, (x,)), optimizer)
    assert seen == pytest.approx(found.measured_bytes - CONTEXT_BYTES, rel=0.25)  # a captured step with its own plan
    assert CONTEXT_BYTES + seen <= budget


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_pipeline_reserves_what_its_rehearsal_did(name: str, tmp_path: Path) -> None:
    """Of two ranks, each a process with a stand-in of its own, on devices that are limited to the budgets.

    Plans that were not rehearsed reserve more than these.
    """
    script = Path(__file__).with_name("ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path), name],
            env={**os.environ, "REMAT_CACHE_DIR": str(tmp_path / f"cache-{rank}")},
            stderr=(tmp_path / f"errors-{rank}").open("w"),
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.wait(timeout=380)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # one that waits for the other does not end by itself
            process.wait()
    said = "\n".join((tmp_path / f"errors-{rank}").read_text()[-2000:] for rank in range(2))
    assert [process.returncode for process in ranks] == [0, 0], said
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2)]
    for rank in found:
        assert rank["seen"] == pytest.approx(rank["foreseen"], rel=0.01)
        assert rank["foreseen"] <= rank["budget"]
        assert rank["watched"][0] == pytest.approx(rank["watched"][1], rel=1e-4)
        assert rank["learned"][0] == rank["learned"][1]
        assert f"{readable(rank['foreseen'])} reserved" in rank["text"]
    less = [rank for rank in found if rank["budget"] < rank["plain"]]
    assert less
    for rank in less:
        assert rank["overhead"] > 0
        assert rank["bold"] > rank["budget"]
