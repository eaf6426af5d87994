"""Reserved bytes of chains, joins, units and the largest batch: their budgets hold for what the driver has to give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.small_models import numbers
from client.test_chain_training import MeanSquare
from remat.compile.plans import UNBOUNDED
from remat.device import Accelerator, of
from remat.planning.budget import UnitBytes
from remat.planning.options import SolveOptions
from remat.planning.planner import planner_for
from remat.profiling import measure
from remat.profiling.room import STEPS, Room
from remat.training.enable import plans_of
from remat.training.job import Job
from remat.training.memory import Whole
from remat.units.unit import Unit
from remat.units.units import optimize_units
from remat_ir import readable
from standin import device
from standin.module import CONTEXT_BYTES
from standin.test_faults import Wide
from standin.test_training import DEVICE

pytestmark = pytest.mark.standin
MIB = 2**20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    device.empty_cache()
    yield
    device.empty_cache()


class Wave(nn.Module):
    """Values of 3 MiB or of 7 MiB in turn, from 8192 rows: segments of 20 MiB are left with some of them over."""

    def __init__(self, *sides: int) -> None:
        super().__init__()
        self.layer = nn.Linear(*sides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(x)).exp().sin()


def waves(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Wave(*((96, 224) if i % 2 == 0 else (224, 96))).to(DEVICE) for i in range(count)]


class Blocks(nn.Module):
    """Waves in pairs, as units."""

    def __init__(self, pairs: int = 2) -> None:
        super().__init__()
        found = waves(2 * pairs)
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
    assert isinstance(there, Accelerator)
    device.empty_cache()
    there.reset_peaks()
    for _ in range(steps):
        run()
        optimizer.step()
        optimizer.zero_grad(set_to_none=clears)
    return there.memory().peak_reserved


def rows(count: int = 8192) -> torch.Tensor:
    return numbers(count, 96).to(DEVICE)


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


def test_units_reserve_what_their_rehearsal_did() -> None:
    model, x = Blocks(), rows()
    plain = trained(measure.forward_backward(model, (x,)), torch.optim.SGD(model.parameters(), 0.0))
    optimizer = torch.optim.AdamW(model.parameters())
    budget = CONTEXT_BYTES + plain - 20 * MIB
    found = optimize_units(model, model.blocks, (x,), budget=budget, planner="greedy", optimizer=optimizer)
    assert found.reserved_bytes is not None
    assert found.reserved_bytes + CONTEXT_BYTES <= budget
    assert found.overhead > 0
    assert f"{readable(found.reserved_bytes)} reserved" in str(found)
    with device.limited(budget - CONTEXT_BYTES):
        seen = trained(measure.forward_backward(model, (x,)), optimizer)
    assert seen == pytest.approx(found.reserved_bytes, rel=0.01)


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
        assert tried.predicted_bytes is not None
        assert tried.predicted_bytes == pytest.approx(tried.measured_bytes, rel=0.01)
    x, optimizer = numbers(found.batch, 64).to(DEVICE), torch.optim.AdamW(model.parameters())
    with device.limited(budget - CONTEXT_BYTES):
        planned = remat.optimize(model, (x,), budget=budget, planner="greedy", optimizer=optimizer)
        seen = trained(measure.forward_backward(planned, (x,)), optimizer)
    assert seen == pytest.approx(found.measured_bytes - CONTEXT_BYTES, rel=0.25)  # a captured step with its own plan
    assert CONTEXT_BYTES + seen <= budget


def test_units_that_are_planned_later_keep_to_the_budget_of_the_model() -> None:
    """By the model, from what is there when a unit is called; held to wide bounds of their own alone, they reserve
    more than that."""
    x, found = rows(), dict[bool, int]()
    model = Blocks(3)
    plain = trained(measure.forward_backward(model, (x,)), torch.optim.AdamW(model.parameters()))
    del model
    budget = plain - 20 * MIB
    for bold in (False, True):
        model = Blocks(3)
        optimizer = torch.optim.AdamW(model.parameters())
        for number, block in enumerate(model.blocks):
            unit = Unit(str(number), block, planner_for("greedy"), SolveOptions())
            unit.size = UnitBytes(UNBOUNDED // 4, UNBOUNDED // 4)
            unit.whole = None if bold else Whole(model, Job(optimizer), CONTEXT_BYTES + budget)
        device.empty_cache()
        with contextlib.nullcontext() if bold else device.limited(budget):
            found[bold] = trained(measure.forward_backward(model, (x,)), optimizer)
        plans = [plan for block in model.blocks for plan in plans_of(block).plans]
        foreseen = [plan.memory.reserved for plan in plans if plan is not None and plan.memory is not None]
        assert len(foreseen) == (0 if bold else 3)
        assert bold or max(foreseen) == pytest.approx(found[bold], rel=0.01)
        del model, optimizer, unit, plans
    assert found[False] <= budget < found[True]
