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


def test_a_planned_module_may_be_transformed() -> None:
    model = remat.enable(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="100%", planner="greedy")

    def gradients() -> Any:
        loss = lambda p: torch.func.functional_call(model, p, (X,)).sum()  # noqa: E731
        return torch.func.grad(loss)(dict(model.named_parameters()))

    found = gradients()
    remat.disable(model)
    expected = gradients()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
