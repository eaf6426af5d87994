"""What tells one kind of call from another: looked at before every step, so it has to be quick."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._compat.module_state import (
    BUFFERS,
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
    MODULES,
    PARAMETERS,
    buffers_of,
    modules_of,
    parameters_of,
)
from ..device import AUTOCAST_KINDS

ASPECTS = ("arguments", "train mode", "parameters", "buffers", "autocast", "hooks")
OF_A_TENSOR = ("shape", "strides", "dtype", "device", "requires_grad", "which of them are one tensor")
"""In the order of `_describe`. A tensor that is passed twice is told from two: some modules, such as
nn.MultiheadAttention, look whether their arguments are one, and run other kernels."""


def kind_of_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that a captured step takes for granted, as a key."""
    leaves: list[Any] = []
    seen: dict[int, int] = {}
    _describe(tuple(args), leaves, seen)
    _describe(dict(kwargs), leaves, seen)
    training: list[bool] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    hooks = 0
    for part in parts(module):
        state = part.__dict__
        training.append(state["training"])
        for p in state[PARAMETERS].values():
            if p is not None:
                parameters += (p.requires_grad, p.dtype, p.device, p.shape)
        for b in state[BUFFERS].values():
            if b is not None:
                buffers += (b.dtype, b.device, b.shape)
        hooks += len(state[FORWARD_HOOKS]) + len(state[FORWARD_PRE_HOOKS])
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_KINDS)
    return tuple(leaves), tuple(training), tuple(parameters), tuple(buffers), autocast, hooks


def what_changed(new: tuple[Any, ...], old: tuple[Any, ...]) -> str:
    """The aspects in which two kinds differ, for the log."""
    found = [name for name, a, b in zip(ASPECTS, new, old, strict=True) if a != b]
    details = _of_arguments(new[0], old[0])
    return ", ".join(f"{name} ({details})" if name == "arguments" and details else name for name in found)


def _of_arguments(new: tuple[Any, ...], old: tuple[Any, ...]) -> str:
    """In what the tensors of two calls differ; empty where the calls are not built alike."""
    pairs = list(zip(new, old, strict=False))
    if len(new) != len(old) or any(_is_tensor(a) != _is_tensor(b) or (a != b and not _is_tensor(a)) for a, b in pairs):
        return ""
    return ", ".join(
        name for i, name in enumerate(OF_A_TENSOR) if any(_is_tensor(a) and a[i] != b[i] for a, b in pairs)
    )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == len(OF_A_TENSOR)


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all modules in it, each once, in an order of its own: `modules()` without names takes longer."""
    seen: set[nn.Module] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is not None and part not in seen:
            seen.add(part)
            yield part
            stack.extend(part.__dict__[MODULES].values())


class Holders:
    """Tensors of a module by name, found again without walking their paths while its modules are the same.

    Args:
        constants: tensors by names that are none of the module's.
    """

    def __init__(self, names: Sequence[str], constants: Mapping[str, torch.Tensor]) -> None:
        self.names, self.constants = tuple(names), constants
        self._parts: list[nn.Module] = []
        self._found: list[tuple[Mapping[str, Any], str]] = []

    def tensors(self, module: nn.Module) -> list[torch.Tensor]:
        """What the names stand for now."""
        now = list(parts(module))
        if now != self._parts:
            self._found = [self._holder(module, name) for name in self.names]
            self._parts = now
        return [holder[name] for holder, name in self._found]

    def _holder(self, module: nn.Module, path: str) -> tuple[Mapping[str, Any], str]:
        if path in self.constants:
            return self.constants, path
        *parents, name = path.split(".")
        for parent in parents:
            module = modules_of(module)[parent]  # type: ignore[assignment]
        own = parameters_of(module)
        return (buffers_of(module) if own.get(name) is None else own), name


def _describe(thing: Any, leaves: list[Any], seen: dict[int, int]) -> None:
    if isinstance(thing, torch.Tensor):
        same = seen.setdefault(id(thing), len(leaves))
        leaves.append((thing.shape, thing.stride(), thing.dtype, thing.device, thing.requires_grad, same))
    elif isinstance(thing, Mapping):
        leaves.append((type(thing), len(thing)))
        for key, value in thing.items():
            leaves.append(key)
            _describe(value, leaves, seen)
    elif isinstance(thing, (tuple, list)):
        leaves.append((type(thing), len(thing)))
        for value in thing:
            _describe(value, leaves, seen)
    elif isinstance(thing, (int, float, str, bool, complex, bytes, type(None), torch.dtype, torch.device)):
        leaves.append((type(thing), thing))
    else:
        leaves.append((type(thing), id(thing)))
