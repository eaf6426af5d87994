"""Recomputation that is not a repetition: operators of which nothing is known run once in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from client.planners import Noting
from client.small_models import module_of
from remat.planning.options import SolveOptions
from remat.training.enable import plans_of
from remat.training.step import training_step
from tiers import first

CALLS: list[int] = []
NOISE = torch.Generator().manual_seed(3)


@torch.library.custom_op("remat_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws from a generator of its own, without the tag that says so."""
    return x * torch.rand(x.shape, generator=NOISE)


@torch.library.custom_op("remat_tests::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    """Has state in Python."""
    CALLS.append(1)
    return x * float(len(CALLS))


@torch.library.custom_op("remat_tests::pure", mutates_args=())
def pure(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


for operator in (noisy, counting, pure):
    operator.register_fake(torch.empty_like)
    operator.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )

LIBRARY = torch.library.Library("remat_tests_old", "DEF")
LIBRARY.define("noise(Tensor x) -> Tensor")
LIBRARY.impl("noise", lambda x: torch.rand(x.shape, generator=NOISE), "CPU")
LIBRARY.impl("noise", torch.empty_like, "Meta")


class Part(nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.one, self.two, self.operator = nn.Linear(64, 64), nn.Linear(64, 64), operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        return x + self.two(torch.tanh(y) * self.operator(y) if self.operator is not old else y * old(y.detach()))


def old(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.remat_tests_old.noise(x)


def model(operator: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Part(operator) for _ in range(4)))


def step(module: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    CALLS.clear()
    NOISE.manual_seed(3)
    module.zero_grad()
    run(torch.linspace(-1, 1, 512 * 64).reshape(512, 64)).square().mean().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


OPERATORS = {"noisy": noisy, "counting": counting, "of the older library": old}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("way", ["enable", "optimize"])
def test_an_operator_that_may_do_anything_runs_once(way: str, name: str) -> None:
    """At a budget where much is computed again, gradients are those without a plan, and the report names it."""
    module = model(OPERATORS[name])
    expected = step(module, module)
    given: dict[str, Any] = {"budget": remat.Fraction(0.8), "planner": "greedy", "self_check": False}
    if way == "enable":
        remat.enable(module, **given)
    else:
        remat.optimize(module, (torch.zeros(512, 64),), **given)
    assert all(map(torch.equal, expected, step(module, module)))
    (planned,) = remat.plans_of(module).plans
    assert (planned.answer.overhead or 0) > 0
    said = "remat_tests_old::noise (4)" if name.startswith("of") else f"remat_tests::{name} (4)"
    assert f"run once, since a custom operator may do anything: {said}" in remat.explain(module)


def test_the_caller_may_say_that_an_operator_is_functional() -> None:
    module, x = model(pure), torch.zeros(512, 64)
    plain = training_step(module, (x,), {}).graph
    free = training_step(module, (x,), {}, functional=("remat_tests::pure",)).graph
    assert len(plain.once) == len(free.once) + 4
    options = SolveOptions(functional_ops=("remat_tests::pure",))
    trained = remat.optimize(module, (x,), budget=remat.Fraction(0.8), planner="greedy", options=options)
    assert "run once" not in remat.explain(trained)


@pytest.mark.parametrize("inner", first(1, ["eager", "inductor"]))
def test_behind_torch_compile_it_runs_once_too(inner: str, caplog: pytest.LogCaptureFixture) -> None:
    module = model(noisy) if inner == "eager" else Part(noisy)
    found = {}
    for name in ("plain", "once", "functional") if inner == "eager" else ("plain", "once"):
        torch._dynamo.reset()
        backend: Any = "aot_eager" if inner == "eager" else "inductor"
        if name != "plain":
            given = {} if name == "once" else {"functional_ops": ("remat_tests::noisy",)}
            budget = remat.Fraction(0.8 if inner == "eager" else 1.0)
            backend = remat.backend(budget, planner="greedy", inner=inner, **given)
        caplog.clear()
        uncached = torch._inductor.config.patch(force_disable_caches=True)
        with caplog.at_level(logging.INFO, "remat"), uncached:
            found[name] = step(module, torch.compile(module, backend=backend, fullgraph=True, dynamic=False))
        if name != "plain":
            graph = backend.planned[0].graph if inner == "eager" else backend.graphs[0]
            custom = [n for n in graph.once if "noisy" in graph.op_label(n)]
            assert len(custom) == ((4 if inner == "eager" else 1) if name == "once" else 0)
            assert inner != "eager" or (backend.answers[0].overhead or 0) > 0
            assert ("run once, since a custom operator may do anything" in caplog.text) == (name == "once")
    assert all(torch.equal(a, b) for a, b in zip(found["plain"], found["once"], strict=True))


@pytest.mark.parametrize(("given", "once"), [({}, 5), ({"functional_ops": ("remat_tests::pure",)}, 1)])
def test_blocks_and_batches_take_the_callers_word_as_well(given: dict[str, Any], once: int) -> None:
    module, x = nn.Sequential(model(pure)), torch.zeros(512, 64)
    remat.enable(nn.ModuleList(module), budget=remat.Fraction(0.9), planner="greedy", **given)
    module(x).sum().backward()
    (planned,) = plans_of(module[0]).plans
    assert len(planned.step.graph.once) == once
    planner, budget = Noting(), remat.ActivationBytes("1MiB")
    remat.max_batch(
        lambda: nn.Sequential(model(pure)),
        lambda batch: torch.zeros(batch, 64),
        budget=budget,
        planner=planner,
        loss=torch.sum,
        limit=64,
        most_tries=1,
        **given,
    )
    assert {len(problem.graph.once) for problem in planner.problems} == {once}


@pytest.mark.parametrize("name", ["backend", "max_batch", "enable", "enable, several"])
def test_an_operator_that_does_not_exist_is_named(name: str) -> None:
    module, nothing = nn.Sequential(nn.Linear(2, 2)), {"budget": "1GiB", "functional_ops": ("remat_tests::nothing",)}
    calls: dict[str, Callable[[], object]] = {
        "backend": lambda: remat.backend(**nothing),
        "max_batch": lambda: remat.max_batch(lambda: module, lambda n: torch.ones(n, 2), **nothing),
        "enable": lambda: remat.enable(module, **nothing),
        "enable, several": lambda: remat.enable(nn.ModuleList(module), **nothing),
    }
    with pytest.raises(remat.RematError, match="remat_tests::nothing"):
        calls[name]()


def test_an_operator_is_named_with_its_namespace() -> None:
    with pytest.raises(remat.RematError, match="functional_ops"):
        remat.enable(nn.Linear(2, 2), budget="1GiB", functional_ops=("pure",))


def test_checkpoints_of_the_module_are_in_the_report() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: Any = checkpoint(lambda a: torch.tanh(self.one(a)), x, use_reentrant=False)
        return checkpoint(lambda a: torch.tanh(self.two(a)), y, use_reentrant=False)

    model = module_of(forward, one=nn.Linear(64, 64), two=nn.Linear(64, 64))
    trained = remat.optimize(model, (torch.zeros(256, 64),), budget=remat.Fraction(1.0), planner="greedy")
    assert "the module's own 2 checkpoints are taken out" in remat.explain(trained)


@pytest.mark.parametrize("on_failure", ["raise", "plain"])
def test_what_the_code_raises_is_raised(on_failure: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 7:
            raise ValueError("seven rows are wanted")
        return self.layer(x)

    made = [module_of(forward, layer=nn.Linear(8, 8)) for _ in range(2)]
    model = remat.enable(made[0], budget=remat.Fraction(1.0), planner="greedy", on_failure=on_failure)
    with pytest.raises(ValueError, match="seven rows are wanted"):
        model(torch.ones(3, 8))
    if on_failure == "raise":
        with pytest.raises(ValueError, match="seven rows are wanted"):
            remat.optimize(made[1], (torch.ones(3, 8),), budget=remat.Fraction(1.0), planner="greedy")
