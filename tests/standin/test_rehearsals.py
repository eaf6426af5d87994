"""Reserved bytes of chains, joins, blocks and the largest batch: their budgets hold for what the driver has to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.small_models import numbers
from client.test_chain_training import MeanSquare
from remat.device import of
from remat.profiling import measure
from remat.profiling.room import STEPS, Room
from remat.training.enable import backend_of
from standin import device
from standin.module import CONTEXT_BYTES
from standin.movable import DEVICE, MIB
from standin.test_faults import Wide

pytestmark = pytest.mark.standin


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
