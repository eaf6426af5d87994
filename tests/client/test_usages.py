"""What people run in a training step: each usage trains as eager PyTorch does, bit for bit, and by as many plans as the
table of `docs/adoption.md` says."""

from __future__ import annotations

import random
import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import remat
from client.small_models import Case, module_of
from client.usages import PARTS, PLAIN, PLANNED, USAGES
from releases.test_lane import Again
from remat.training.enable import backend_of

TABLE = Path(__file__).parents[2] / "docs" / "adoption.md"
BY_HAND = {"flex_attention_with_a_score", "flex_attention_with_a_block_mask"}
"""On a CPU torch refuses to differentiate them, although its reference kernel can be: without that check it is run."""


pytestmark = pytest.mark.usefixtures("anew")


def trained(case: Case, call: Callable[..., Any], after: Callable[[], None] = lambda: None) -> list[list[Any]]:
    """Of two steps on different numbers: output, gradients, weights, buffers, and the states of generators."""
    torch.manual_seed(5)
    random.seed(5)
    found = []
    for step in range(2):
        floats = (isinstance(given, torch.Tensor) and given.is_floating_point() for given in case.args)
        args = [given + 0.01 * step if real else given for given, real in zip(case.args, floats, strict=True)]
        case.module.zero_grad()
        output = call(*args, **case.kwargs)
        (output if case.loss is None else case.loss(output)).backward()
        after()
        gradients = [None if p.grad is None else p.grad.to_dense() for p in case.module.parameters()]
        with torch.no_grad():
            for parameter in case.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.05 * parameter.grad)
        state = [each.detach().clone() for each in (*case.module.parameters(), *case.module.buffers())]
        found.append([output.detach().clone(), *gradients, *state, torch.get_rng_state(), random.getstate()])
    return found


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def made(name: str) -> Case:
    torch.manual_seed(0)
    return USAGES[name].make()


@pytest.mark.parametrize("name", [name for name in USAGES if name != "part_compiled_by_inductor"])
def test_a_usage_trains_as_the_table_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in BY_HAND:
        monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    plain, case = made(name), made(name)
    expected = trained(plain, plain.module)
    remat.enable(case.module, budget="1GiB", planner=Again())
    by_step = [0]
    found = trained(case, case.module, lambda: by_step.append(backend_of(case.module).calls))
    for one, other in zip(expected, found, strict=True):
        assert all(map(same, one, other))
    by_plans = by_step[-1] - by_step[-2]
    assert USAGES[name].verdict == (PLAIN if not by_plans else PLANNED if by_plans == 1 else PARTS)


@pytest.mark.slow
def test_a_part_that_inductor_compiles_is_taken_into_the_plan() -> None:
    """Its kernels are torch's own then, as under `backend="aot_eager"`."""
    plain, case = made("part_compiled_by_inductor"), made("part_compiled_by_inductor")
    expected = trained(plain, torch.compile(plain.module, backend="aot_eager"))
    torch._dynamo.reset()
    remat.enable(case.module, budget="1GiB", planner=Again())
    for one, other in zip(expected, trained(case, case.module), strict=True):
        assert all(map(same, one, other))
    assert backend_of(case.module).calls == 2


def test_the_table_has_a_row_for_each_usage() -> None:
    text = TABLE.read_text().partition("## What people run in a step")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!usage|---)(.+?) \| (.+?) \|$", text, re.MULTILINE)
    assert rows == [(usage.text, usage.verdict) for usage in USAGES.values()]


def test_a_second_derivative_through_a_plan_is_refused_by_a_sentence() -> None:
    case = made("straight_through_estimator")
    x = case.args[0].requires_grad_()
    remat.enable(case.module, budget="100%", planner="greedy")
    (gradient,) = torch.autograd.grad(case.module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative is asked for"):
        gradient.square().sum().backward()
    case.module(x).sum().backward(create_graph=True)  # the first alone is there
    assert x.grad is not None


def test_a_capture_that_fails_leaves_the_modes_as_they_were() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """What torch cannot trace lies where gradients are disabled, after a part that trains."""
        y = self.first(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            scale = torch.nested.nested_tensor_from_jagged(y, torch.tensor([0, 2, 3])).sin().values()
        return y * scale

    model, x = module_of(forward, first=torch.nn.Linear(4, 4)), torch.randn(3, 4)
    model(x).sum().backward()
    expected = model.first.weight.grad
    model.zero_grad()
    remat.enable(model, budget="100%", planner="greedy")
    model(x).sum().backward()
    assert backend_of(model).calls == 0
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")  # noqa: PT018
    assert torch.equal(expected, model.first.weight.grad)


X = torch.ones(4, 8)


@dataclass
class Batch:
    x: torch.Tensor


class OfBatch(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch.x if isinstance(batch, Batch) else batch["x"])


def recording() -> nn.Module:
    seen: list[torch.Tensor] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model[0].register_forward_hook(lambda module, given, made: seen.append(made))
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), X),
    "spectral norm, the older": (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))), X),
    "weight norm, the older": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8))), X),
    "a hook that records": (recording, X),
    "a dataclass": (lambda: OfBatch(8, 8), Batch(X)),
    "a UserDict": (lambda: OfBatch(8, 8), UserDict(x=X)),
}


@pytest.mark.parametrize("name", CASES)
def test_they_train(name: str) -> None:
    make, given = CASES[name]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = remat.optimize(make(), (given,), budget="100%", planner="greedy")
    for each in (plain, model):
        each(given).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert remat.plans_of(model).plans
