"""Hooks of stages while their costs are measured: none writes to what is the caller's, and those that compute run."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.chains.hooks import copied_apart

SEEN: list[Any] = []
log = logging.getLogger("hooks of stages")


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.calls = 0

    def look(self, module: nn.Module, given: Any, made: Any) -> None:
        self.seen.append(made)
        self.calls += 1

    def __call__(self, module: nn.Module, given: Any, made: Any) -> None:
        self.look(module, given, made)


def recording(module: nn.Module, given: Any, made: Any) -> None:
    SEEN.append(made)
    log.warning("called")


def counting(seen: dict[str, int], module: nn.Module, given: Any, made: Any) -> None:
    seen["calls"] = seen.get("calls", 0) + 1


@pytest.mark.parametrize("order", ["planned first", "trained first"])
def test_hooks_of_stages_are_called_by_the_steps_alone(order: str, caplog: pytest.LogCaptureFixture) -> None:
    stages = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    closed: list[Any] = []
    counts: dict[str, int] = {}
    recorder, bound = Recorder(), Recorder()
    SEEN.clear()

    def closing(module: nn.Module, given: Any, made: Any) -> None:
        closed[len(closed) :] = [made]

    hooks: list[Any] = [recording, closing, lambda m, i, o: closed.append(o), partial(counting, counts), recorder]
    for hook in (*hooks, bound.look):
        stages[1].register_forward_hook(hook)
    stages[0].register_forward_pre_hook(lambda m, given: closed.append(given))
    stages[2].register_full_backward_hook(lambda m, i, o: closed.append(o))
    chain = remat.optimize_chain(stages, torch.ones(4, 8), budget="100%", planner="greedy")
    assert (SEEN, closed, counts, recorder.calls, bound.calls) == ([], [], {}, 0, 0)
    assert not [r for r in caplog.records if r.name == log.name]
    for _ in range(2):
        chain(torch.ones(4, 8)).sum().backward()
    assert (len(SEEN), len(closed), counts, recorder.calls, bound.calls) == (2, 2 * 4, {"calls": 2}, 2, 2)


def test_hooks_that_compute_run_in_a_copy() -> None:
    """Among them those of torch's own norms, and one that reads the module that it is on."""
    x = torch.randn(4, 8)
    layer = nn.utils.spectral_norm(nn.Linear(8, 8))
    layer.register_forward_hook(lambda module, given, made: made * 2)

    def in_place(module: nn.Module, given: Any, made: torch.Tensor) -> None:
        made.add_(1)

    def of_the_layer(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
        assert module is layer
        return made + layer.bias

    layer.register_forward_hook(in_place)
    layer.register_forward_hook(of_the_layer)
    layer.eval()
    with torch.no_grad():
        assert torch.equal(copied_apart(layer)(x), layer(x))
