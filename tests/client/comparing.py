"""Whether two models train the same, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from remat.profiling import measure


def gradients(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def equal(one: Iterable[torch.Tensor | None], other: Iterable[torch.Tensor | None]) -> bool:
    """Whether there is something, as much in both, and each of it is missing in both or the same."""
    mine, theirs = list(one), list(other)
    same = ((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(mine, theirs, strict=False))
    return len(mine) == len(theirs) > 0 and all(same)


def step_differences(
    plain: nn.Module,
    model: nn.Module,
    args: tuple[Any, ...],
    run: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> list[str]:
    """What a step of the module leaves otherwise than one of its plain copy; `run` calls the module, if not it does."""
    steps = ((plain, plain), (model, model if run is None else run))
    found = [measure.outcome(each, measure.forward_backward(call, args, loss=loss)) for each, call in steps]
    return measure.differences(*found)


def outcome(
    module: nn.Module, run: Any, x: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = None
) -> measure.Outcome:
    """What a step leaves behind; the module's state is put back afterwards."""
    state = copy.deepcopy(module.state_dict())
    found = measure.outcome(module, measure.forward_backward(run, (x,), loss=loss))
    module.load_state_dict(state)
    return found
