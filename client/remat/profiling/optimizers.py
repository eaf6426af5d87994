"""What an optimizer will hold, before its first step has made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_ir import InvalidData

from .fixed import here

_COPIES = {
    "Adadelta": 2,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "ASGD": 1,
    "Muon": 1,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "Rprop": 2,
}
"""Tensors as large as the parameter that its state has, beside what the settings add."""

_SETTINGS = {"Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("momentum", "centered"), "SGD": ("momentum",)}
"""Settings each of which adds one more."""


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer; None is none at all.

    Raises:
        InvalidData: it lacks the parameter groups or the state of one.
    """
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise InvalidData(f"optimizer must be a torch.optim.Optimizer or None, not {optimizer!r}")


def optimizer_state(optimizer: Any) -> int:
    """Bytes that an optimizer holds, or will hold once its first step has made its state.

    Known are torch's own optimizers but LBFGS, SparseAdam and Adafactor; others, and classes derived from these, are
    counted by the nearest known one among their bases, and as what they hold now where that is more. A few bytes a
    parameter, for counters of steps, come on top.
    """
    if optimizer is None:
        return 0
    kind = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in {*_COPIES, *_SETTINGS}), "")
    total = 0
    for group in optimizer.param_groups:
        copies = _COPIES.get(kind, 0) + sum(bool(group.get(name)) for name in _SETTINGS.get(kind, ()))
        for parameter in group["params"]:
            if parameter.requires_grad:
                state = map(here, _tensors(optimizer.state.get(parameter, {})))
                there = sum(t.numel() * t.element_size() for t in state)
                total += max(there, copies * here(parameter).numel() * parameter.element_size())
    return total


def _tensors(state: Mapping[str, Any]) -> list[Any]:
    return [value for value in state.values() if hasattr(value, "element_size")]
