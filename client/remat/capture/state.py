"""Python's state that a call of a module depends on, as a key: where no guard of Dynamo's stands for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .._compat.module_state import BUFFERS, FORWARD_HOOKS, FORWARD_PRE_HOOKS, MODULES, PARAMETERS
from ..device import AUTOCAST_KINDS


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """The train mode, the parameters' and buffers' metadata, autocast, the number of hooks and which modules these are,
    as a key."""
    training: list[bool] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    hooks = 0
    modules = tuple(parts(module))
    for part in modules:
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
    return tuple(training), tuple(parameters), tuple(buffers), autocast, hooks, tuple(map(weakref.ref, modules))


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
