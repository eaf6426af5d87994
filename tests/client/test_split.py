"""Parameters that are split over ranks (DTensor) in one process, whose group speaks with nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import remat
from client.comparing import equal
from remat.errors import CaptureError
from remat.training.enable import backend_of, plans_of

BUDGET = remat.Fraction(0.8)
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of two ranks, one of which is here."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def split(mesh: Any, local: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(Block(), Block())
    for number, block in enumerate(made):
        down = RowwiseParallel(use_local_output=local or number == 0)
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": down})
    return made


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    (y.to_local() if isinstance(y, DTensor) else y).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    return [g.to_local() if isinstance(g, DTensor) else g for g in found if g is not None]


@pytest.mark.thorough
@pytest.mark.parametrize("local", [True, False])
def test_gradients_are_those_without_a_plan(mesh: Any, local: bool) -> None:
    """The result may be a DTensor, too; the optimizer's state is counted on the shards."""
    plain, planned, x = split(mesh, local), split(mesh, local), torch.randn(64, WIDTH)
    optimizer = torch.optim.AdamW(planned.parameters())
    remat.enable(planned, budget=BUDGET, planner="greedy", optimizer=optimizer)
    assert equal(gradients(plain, x), gradients(planned, x))
    (plan,) = (p for p in plans_of(planned).plans if p)
    assert (plan.answer.overhead or 0) > 0
    assert plan.step.split
    fixed = plan.step.fixed
    assert 2 * fixed["parameters"] <= fixed["optimizer state"] < 2.1 * fixed["parameters"]


@pytest.mark.thorough
def test_a_better_plan_takes_over(mesh: Any) -> None:
    """One capture is compiled for two plans: torch empties what it knows of a DTensor when it compiles."""
    model, x = split(mesh), torch.randn(64, WIDTH)
    remat.enable(nn.ModuleList(model), budget=BUDGET, planner="greedy")
    for _ in range(5):
        model(x).sum().backward()
    found = backend_of(model[0]).division
    assert found.overhead > 0


@pytest.mark.thorough
def test_a_write_before_the_backward_pass_is_seen(mesh: Any) -> None:
    """Autograd is given the local shard, whose version counter the write leaves as it is."""
    planned = remat.enable(split(mesh), budget=BUDGET, planner="greedy")
    loss = planned(torch.randn(64, WIDTH)).sum()
    with torch.no_grad():
        planned[1].up.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"1\.up\.weight, which the backward pass reads, has been modified"):
        loss.backward()


@pytest.mark.thorough
def test_gradients_of_shards_are_not_released(mesh: Any) -> None:
    model = split(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    remat.enable(model, budget=BUDGET, planner="greedy", optimizer=optimizer, release_gradients=True)
    with pytest.raises(CaptureError, match=r"release_gradients=True, and 0\.up\.weight is split over ranks"):
        model(torch.randn(64, WIDTH))
