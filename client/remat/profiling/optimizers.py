"""What an optimizer will hold, before its first step has made it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from remat_ir import InvalidData

from .. import _compat, generators
from ..device import Accelerator, of
from .fixed import here

SMALL = 128
"""Rows and columns of a parameter on which steps of an optimizer are measured."""

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
"""Tensors as large as the parameter that its state has, besides what the settings add."""

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


def trained_by(optimizer: Any) -> list[Any]:
    """What this rank holds of the parameters that an optimizer trains."""
    groups = () if optimizer is None else optimizer.param_groups
    return [here(p) for group in groups for p in group["params"] if p.requires_grad]


def step_bytes(optimizer: Any) -> int:
    """Bytes that a step of an optimizer allocates besides its state, and frees again.

    Where the parameters of a group are worked on together (`foreach`, what torch does on accelerators), these are
    copies of all of them, else of the largest one; fused kernels make none. How many is measured: a step of the same
    class of torch's with the same settings on small parameters of the CPU. One that cannot be made so counts as none.
    """
    if _compat.recording():  # the caller's profiler: another thread has none
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(step_bytes, optimizer).result()
    kind = next((base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim.")), None)
    most = 0
    for group in () if optimizer is None else optimizer.param_groups:
        own = [here(p) for p in group["params"] if p.requires_grad]
        if not own or kind is None:
            continue
        together = _together(group, own)
        sizes = [p.numel() * p.element_size() for p in own]
        most = max(most, int(_copies_of_a_step(kind, group, together) * (sum if together else max)(sizes)))
    return most


def _together(group: Mapping[str, Any], parameters: Sequence[Any]) -> bool:
    if group.get("fused") or "foreach" not in group:
        return False
    alike = all(isinstance(of(p.device), Accelerator) for p in parameters)
    return alike if group["foreach"] is None else bool(group["foreach"])


def _copies_of_a_step(kind: Any, group: Mapping[str, Any], together: bool) -> float:
    """Bytes that a step makes and frees again, as a multiple of the bytes of its parameters."""
    taken = inspect.signature(kind).parameters
    settings = {k: v for k, v in group.items() if k in taken and k not in ("params", "foreach", "capturable")}
    settings |= {"foreach": together} if "foreach" in taken and not group.get("fused") else {}
    count = 4 if together else 1
    with torch.enable_grad(), generators.kept(torch.device("cpu")):
        parameters = [torch.nn.Parameter(torch.zeros(SMALL, SMALL)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        watch = of("cpu").watch()
        try:
            small = kind(parameters, **settings)
            small.step()  # makes the state
            watch.start()
            try:
                small.step()
            finally:
                (found,) = watch.stop()
        except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
            return 0.0
    size = sum(p.numel() * p.element_size() for p in parameters)
    return max(0, found.peak_bytes - max(0, found.left_bytes)) / size


def _tensors(state: Mapping[str, Any]) -> list[Any]:
    return [value for value in state.values() if hasattr(value, "element_size")]
