"""In place and under torch.compile: the same gradients as stock, the module still itself."""

from __future__ import annotations

import copy

import pytest
import torch
from functorch.compile import nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import remat
from client.comparing import equal
from remat.training.enable import plans_of
from tiers import first


class Block(nn.Module):
    """Convolution, batch statistics, dropout and a residual: everything that replaying may get wrong."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    """Six blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(6)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.first(x)).mean((2, 3))).square().mean()


def trained(model: nn.Module, run: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Losses, gradients, buffers and the generator's state after a few steps."""
    torch.manual_seed(5)
    found: list[torch.Tensor] = []
    for step in range(steps):
        loss = run(torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        found.append(loss.detach())
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *model.buffers(), torch.get_rng_state()]


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module]:
    """The same module twice, and no compilations of other tests."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


def stock(model: nn.Module) -> list[torch.Tensor]:
    """What stock aot_eager trains."""
    return trained(model, torch.compile(model, backend=aot_autograd(fw_compiler=nop, bw_compiler=nop), fullgraph=True))


@pytest.mark.thorough
def test_a_copy_of_a_backend_is_the_backend() -> None:
    """Where Lightning is imported `torch.compile` copies its arguments, and a planner's locks have no copies."""
    pytest.importorskip("lightning")
    backend = remat.backend("1GiB", planner="local")
    assert copy.deepcopy({"backend": backend})["backend"] is backend
    torch.compile(nn.Linear(4, 4), backend=backend, dynamic=False)(torch.randn(2, 4)).sum().backward()
    assert len(backend.answers) == 1


def test_backend_refuses_what_it_does_not_run() -> None:
    """An inner compiler that is not there is named."""
    with pytest.raises(ValueError, match="'eager'"):
        remat.backend("1GiB", planner="greedy", inner="cudagraphs")


@pytest.mark.parametrize("part", first(1, ["a unit", "the whole", "a chain"]))
def test_torch_compile_around_a_planned_module(models: tuple[nn.Module, nn.Module], part: str) -> None:
    """What runs by a plan is left as it is, once more for each kind; what is around it is compiled."""
    model, planned = models
    if part == "a chain":
        planned.blocks = remat.optimize_chain(
            planned.blocks, planned.first(torch.ones(4, 3, 12, 12)), budget=remat.Fraction(0.7), planner="greedy"
        )
    else:
        remat.enable(planned if part == "the whole" else planned.blocks, budget=remat.Fraction(0.7), planner="greedy")
    assert equal(trained(planned, torch.compile(planned, backend="aot_eager")), trained(model, model))
    if part != "a chain":
        plans = plans_of(planned if part == "the whole" else planned.blocks).plans
        assert [step.answer.overhead > 0 for step in plans] == [True]


def test_enable_sees_the_train_mode(models: tuple[nn.Module, nn.Module]) -> None:
    """Going to evaluation and back trains on by the same plan."""
    _, planned = models
    remat.enable(planned, budget=remat.Fraction(0.8), planner="greedy")
    x = torch.randn(2, 3, 8, 8)
    planned(x).backward()
    with torch.no_grad():
        planned.eval()(x)
    planned.train()(x).backward()
    assert len(plans_of(planned).plans) == 1
