"""Operators that make nothing and raise: they run once, in their place, and factorizations train as in `aot_eager`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.comparing import equal
from client.small_models import module_of
from remat._compat.versions import version
from remat.training.enable import plans_of
from tiers import first

pytestmark = pytest.mark.usefixtures("anew")

SIZE = 24
linalg = torch.linalg


def positive(h: torch.Tensor) -> torch.Tensor:
    """Symmetric and positive definite, which tensors made from metadata are not."""
    return h @ h.mT + 3 * torch.eye(SIZE)


def lu_solved(h: torch.Tensor) -> torch.Tensor:
    factors, pivots = linalg.lu_factor(positive(h))
    return linalg.lu_solve(factors, pivots, h)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cholesky": lambda h: linalg.cholesky(positive(h)),
    **({"torch.cholesky": lambda h: torch.cholesky(positive(h))} if version() < (2, 15) else {}),
    "cholesky_solve": lambda h: torch.cholesky_solve(h, linalg.cholesky(positive(h))),
    "lu": lambda h: linalg.lu(positive(h))[1],
    "lu_factor and lu_solve": lu_solved,
    "torch.lu": lambda h: torch.lu(positive(h))[0],
    "inv": lambda h: linalg.inv(positive(h)),
    "solve": lambda h: linalg.solve(positive(h), h),
    "logdet": lambda h: torch.logdet(positive(h)) * h,
    "a normal distribution": lambda h: (
        torch.distributions.MultivariateNormal(h[0], positive(h), validate_args=False).log_prob(h[1]) * h
    ),
}


class Factored(nn.Module):
    """Layers around a function; what it is given grows with `scale`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.function = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 8 * SIZE), function

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.one(x)) * scale
        y = torch.tanh(self.two(h))
        for _ in range(3):
            y = torch.sin(y) * y
        return y.sum() + self.function(h).square().mean()


def step(model: nn.Module, run: Any, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = run(torch.randn(SIZE, SIZE), torch.ones(()))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", first(2, FUNCTIONS))
def test_factorizations_train_bit_for_bit(name: str) -> None:
    """What refuses made-up inputs is measured on what precedes it makes."""
    model = Factored(FUNCTIONS[name])
    plain, compiled = copy.deepcopy(model), copy.deepcopy(model)
    stock = torch.compile(plain, backend="aot_eager", fullgraph=True)
    remat.enable(model, budget=remat.Fraction(0.75), planner="greedy", mode="graph", self_check=False)
    backend = remat.backend(remat.Fraction(0.75), planner="greedy")
    behind = torch.compile(compiled, backend=backend, fullgraph=True, dynamic=False)
    for seed in range(2):
        expected = step(plain, stock, seed)
        assert equal(expected, step(model, model, seed))
        assert equal(expected, step(compiled, behind, seed))
    (planned,) = plans_of(model).plans
    assert (planned.answer.overhead or 0) > 0
    assert (backend.answers[0].overhead or 0) > 0


@pytest.mark.parametrize("name", ["cholesky", "inv"])
def test_what_is_singular_raises_as_it_does_without_a_plan(name: str) -> None:
    """In the forward pass, although no value of the check is read; a later call trains again."""

    def function(h: torch.Tensor) -> torch.Tensor:
        return (linalg.cholesky if name == "cholesky" else linalg.inv)(h @ h.mT)

    model = Factored(function)
    remat.enable(model, budget=remat.Fraction(1.0), planner="greedy", mode="graph")
    plain = copy.deepcopy(model)
    remat.disable(plain)
    assert equal(step(plain, plain, 0), step(model, model, 0))
    for run in (plain, model):
        with pytest.raises(linalg.LinAlgError):
            run(torch.randn(SIZE, SIZE), torch.zeros(()))
    assert equal(step(plain, plain, 1), step(model, model, 1))


@pytest.mark.parametrize("way", first(1, ["enable", "eager", "inductor"]))
def test_an_assertion_on_data_is_kept(way: str) -> None:
    def forward(self: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(x))
        torch._assert_async((scale > 0).all(), "the scale must be positive")
        return (h * scale).sum()

    model = module_of(forward, layer=nn.Linear(SIZE, SIZE))
    run: Any = model
    if way == "enable":
        remat.enable(model, budget=remat.Fraction(1.0), planner="greedy", mode="graph")
    else:
        backend = remat.backend(remat.Fraction(1.0), planner="greedy", inner=way)
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    step(model, run, 0)
    with pytest.raises(RuntimeError, match="the scale must be positive"):
        run(torch.randn(SIZE, SIZE), -torch.ones(()))


def selecting() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return torch.masked_select(h, h > 0).sum()

    return module_of(forward, layer=nn.Linear(SIZE, SIZE))


def test_a_size_that_depends_on_the_data_is_refused_where_there_may_be_one_graph() -> None:
    backend = remat.backend(remat.Fraction(1.0), planner="greedy", on_failure="raise")
    run = torch.compile(selecting(), backend=backend, fullgraph=True, dynamic=False)
    with pytest.raises(Exception, match=r"depends on the data"):
        run(torch.ones(SIZE, SIZE))


def test_the_parts_around_a_size_that_depends_on_the_data_train_by_plans() -> None:
    """The remedy that the refusal names: bit for bit what `aot_eager` gives, whatever the data select."""

    def trained(backend: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Sigmoid()) for _ in range(4))
        model = module_of(lambda self, x: self.last(self.first(x)), first=nn.Sequential(*layers), last=selecting())
        run = torch.compile(model, backend=backend, dynamic=False)
        steps = [run(torch.randn(512, SIZE)) for _ in range(3)]
        torch.stack(steps).sum().backward()
        return [*steps, *(p.grad for p in model.parameters() if p.grad is not None)]

    behind = remat.backend(330_000, planner="greedy")
    assert equal(trained("aot_eager"), trained(behind))
    assert (behind.answers[0].overhead or 0) > 0
