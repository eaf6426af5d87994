"""What changes between the forward and the backward pass, shallow copies, and hooks around all modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import remat
from client.comparing import equal
from remat.planning.options import SolveOptions
from remat.training.enable import plans_of
from remat_ir import Answer, Problem, plain_plan
from remat_ir.greedy import checkpointed
from tiers import first


class Given:
    """Plans that keep the least, or everything."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def plan(self, problem: Problem, options: SolveOptions, *, on_progress: Any = None) -> Answer:
        return Answer.of_plan(problem, self.make(problem.graph), method="greedy")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.alpha = nn.Linear(32, 32), nn.Linear(32, 32), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x)))) * torch.sigmoid(x) * self.alpha


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def step(model: nn.Module, run: Any, between: Callable[[Any], object] = lambda model: None) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = run(torch.linspace(-1, 1, 64 * 32).reshape(64, 32)).square().sum()
    between(model)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def enabled(make: Callable[..., Any]) -> nn.Sequential:
    return remat.enable(blocks(), budget="1GiB", planner=Given(make), mode="graph", self_check=False)


def swap(model: Any) -> None:
    model[1].one.weight.data = model[1].one.weight.data * 1.5


def write(model: Any) -> None:
    with torch.no_grad():
        model[1].two.weight.mul_(1.5)


def write_unseen(model: Any) -> None:
    model[1].two.weight.data.mul_(1.5)


@pytest.mark.parametrize("make", [checkpointed, plain_plan])
def test_a_write_in_place_before_backward_is_refused_by_autograd(make: Callable[..., Any]) -> None:
    model = enabled(make)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, model, write)


def test_a_storage_that_is_put_in_anothers_place_before_backward_is_refused_by_name() -> None:
    """Where the plan computes from it again; elsewhere the step is that of `aot_eager`, which reads the new one."""
    model = enabled(checkpointed)
    before = step(model, model)
    with pytest.raises(remat.CaptureError, match=r"1\.one\.weight was given another storage between the forward and"):
        step(model, model, swap)
    plain, kept = blocks(), enabled(plain_plan)
    torch._dynamo.reset()
    stock = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert equal(step(plain, stock), before)
    assert equal(step(plain, stock, swap), step(kept, kept, swap))
    swap(plain)
    swap(kept)
    assert equal(step(plain, stock), step(kept, kept)), "between steps it may change"


def test_a_write_that_autograd_does_not_see_is_read_by_what_is_computed_again() -> None:
    """As documented: nothing sees it. A plan that computes nothing again gives what `aot_eager` does."""
    plain, kept, again = blocks(), enabled(plain_plan), enabled(checkpointed)
    torch._dynamo.reset()
    stock = torch.compile(plain, backend="aot_eager", fullgraph=True)
    expected = step(plain, stock, write_unseen)
    assert equal(expected, step(kept, kept, write_unseen))
    assert not equal(expected, step(again, again, write_unseen))


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float32, torch.float64]))
def test_a_write_that_autograd_does_not_see_is_refused_where_checksums_are_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight, and of a bias that the plain step would not read again; between steps it may be written."""
    monkeypatch.setenv("REMAT_CHECK_WRITES", "1")
    model = enabled(checkpointed).to(dtype)

    def write_bias(model: Any) -> None:
        model[1].one.bias.data.add_(1)

    run = lambda x: model(x.to(dtype))  # noqa: E731
    for write, name in ((write_unseen, "two.weight"), (write_bias, "one.bias")):
        step(model, run)
        with pytest.raises(remat.CaptureError, match=rf"1\.{name} was written to through \.data between"):
            step(model, run, write)
    plain = blocks().to(dtype)
    plain.load_state_dict(model.state_dict())
    torch._dynamo.reset()
    stock = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert equal(step(plain, lambda x: stock(x.to(dtype))), step(model, run))


def test_two_calls_may_run_backward_in_any_order() -> None:
    """Each looks at the storages of its own forward pass."""
    plain, model = blocks(), enabled(checkpointed)
    for module in (plain, model):
        first, second = (module(torch.full((8, 32), value)).square().sum() for value in (0.5, 0.25))
        first.backward()
        second.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("way", first(1, ["enable", "optimize"]))
def test_a_shallow_copy_runs_by_its_own_attributes_or_not_at_all(way: str) -> None:
    """As replicas of data parallel are."""
    x, model = torch.ones(4, 32), Block()
    given: dict[str, Any] = {"budget": remat.Fraction(1.0), "planner": "greedy"}
    run = remat.enable(model, **given) if way == "enable" else remat.optimize(model, (x,), **given)
    expected = run(x)
    copied: Any = copy.copy(run)
    copied.alpha = 3.0
    with pytest.raises(remat.CaptureError, match="this Block is a shallow copy of the one"):
        copied(x)
    remat.disable(copied)
    assert torch.equal(copied(x), expected * 3)
    assert torch.equal(run(x), expected), "the source is as it was"
    with pytest.raises(remat.CaptureError, match="shallow copy"):
        run._replicate_for_data_parallel()(x)


@pytest.mark.parametrize("way", first(1, ["enable", "optimize"]))
def test_hooks_of_all_modules_run_once_beside_own_hooks(way: str) -> None:
    plain, model = blocks(), blocks()
    given: dict[str, Any] = {"budget": remat.Fraction(1.0), "planner": "greedy", "mode": "graph"}
    everywhere = register_module_forward_hook(lambda module, args, output: output * 1.25)
    run: Any = model
    try:
        if way == "optimize":
            run = remat.optimize(model, (torch.ones(64, 32),), **given)
        else:
            remat.enable(model, **given)
        for hooked in (plain, run):
            hooked.register_forward_hook(lambda module, args, output: output * 3)
        for _ in range(2):
            assert equal(step(plain, plain), step(model, run))
        assert len(plans_of(model).plans) == 1
    finally:
        everywhere.remove()
    assert equal(step(plain, plain), step(model, run)), "and no longer"
