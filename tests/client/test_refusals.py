"""What is refused names the cause, and a way out that works."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import remat
from remat.errors import CaptureError

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


NORM = r"spectral norm and the older weight norm set a weight or a buffer in each call"
CASES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), X, NORM),
    "spectral norm, the older": (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))), X, NORM),
    "weight norm, the older": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8))), X, NORM),
    "a hook that records": (recording, X, "a hook records there: remove it while training"),
    "a dataclass": (lambda: OfBatch(8, 8), Batch(X), "class in which torch finds no tensors: pass a tensor, a tuple"),
    "a UserDict": (lambda: OfBatch(8, 8), UserDict(x=X), "class in which torch finds no tensors: pass a tensor, a"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_and_the_way_out_works(name: str) -> None:
    make, given, said = CASES[name]
    with pytest.raises(CaptureError, match=said) as raised:
        remat.optimize(make(), (given,), budget="100%", planner="greedy", mode="graph")
    assert "backend=remat.backend(budget)" in str(raised.value)
    model = make()
    compiled = torch.compile(model, backend=remat.backend("100%", planner="greedy"), dynamic=False)
    compiled(given).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_transform_around_a_planned_module_is_named() -> None:
    model = remat.enable(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="100%", planner="greedy")

    def gradients() -> Any:
        loss = lambda p: torch.func.functional_call(model, p, (X,)).sum()  # noqa: E731
        return torch.func.grad(loss)(dict(model.named_parameters()))

    with pytest.raises(CaptureError, match=r"inside a transform of torch\.func .*remat\.disable"):
        gradients()
    remat.disable(model)
    assert gradients()["0.weight"].shape == (8, 8)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.xfail(strict=True, reason="One front door: torch.compile")
def test_they_train(name: str) -> None:
    make, given, _ = CASES[name]
    remat.optimize(make(), (given,), budget="100%", planner="greedy")(given).sum().backward()
