"""The state of a module: where nn.Module, and the wrappers that are modules, keep it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as _module

from .versions import require

__all__ = [
    "BUFFERS",
    "CALL_HOOKS",
    "FORWARD_HOOKS",
    "FORWARD_PRE_HOOKS",
    "GLOBAL_HOOKS",
    "HANDLED",
    "MODULES",
    "MODULES_OWN",
    "PARAMETERS",
    "SHARED",
    "active_ddp",
    "backward_hooks_of_all",
    "buffers_of",
    "called_module",
    "flattened_by_fsdp",
    "forward_pre_hooks",
    "global_hooks",
    "has_backward_hooks",
    "has_hooks",
    "has_tensor_hooks",
    "hooks_put_back",
    "hooks_set_aside",
    "modules_of",
    "parameters_of",
    "sharded_by_fsdp",
    "unreduced_by_fsdp",
]

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""The dictionaries of a module itself, in its `__dict__`. What is looked at before every step reads them there:
`named_parameters` and its like walk and name the whole tree, and give no way to put a tensor in another's place."""

FORWARD_HOOKS, FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")

CALL_HOOKS = (FORWARD_HOOKS, FORWARD_PRE_HOOKS, *_BACKWARD_HOOKS)
"""The hooks that run around a module's call."""

SHARED = (
    PARAMETERS,
    BUFFERS,
    MODULES,
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What two modules have in common that are one to whoever reads, loads or replaces their state."""

MODULES_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""What nn.Module itself keeps on each module, but for its train mode."""

GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
"""The hooks that run around every module's call."""

HANDLED = frozenset(
    name
    for held in (nn.Module().__dict__, vars(_module))
    for name, value in held.items()
    if isinstance(value, dict) and name.startswith("_") and "hooks" in name
)
"""The dictionaries of hooks, a module's and those of all modules. Their keys are the numbers of handles, which torch
counts through the whole process, and mean nothing but which entries are of one handle."""

require([f"nn.Module.{name}" for name in sorted({*CALL_HOOKS, *SHARED}) if name not in nn.Module().__dict__])
require([name for name in GLOBAL_HOOKS if not hasattr(_module, name)])


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, to be read and replaced."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """A module's own buffers by name, to be read and replaced."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own submodules by name."""
    return module._modules


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of a module's own run around its call."""
    return any(module.__dict__[name] for name in CALL_HOOKS)


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks see a tensor's gradient."""
    return bool(tensor._backward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks of a module's own run in its backward pass."""
    return any(module.__dict__[name] for name in _BACKWARD_HOOKS)


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """What runs before a module's forward."""
    return list(module._forward_pre_hooks.values())


def backward_hooks_of_all() -> bool:
    """Whether hooks run in every module's backward pass."""
    return any(getattr(_module, f"_global{name}") for name in _BACKWARD_HOOKS)


def global_hooks() -> tuple[Any, ...]:
    """The hooks that run around every module's call, in order."""
    return tuple(hook for name in GLOBAL_HOOKS for hook in getattr(_module, name).values())


HooksAside: TypeAlias = list[dict[Any, Any]]
"""The hooks that run around every module's call, set aside."""


@contextlib.contextmanager
def hooks_set_aside() -> Iterator[HooksAside]:
    """Inside, no hooks run around every module's call; gives them for `hooks_put_back`."""
    before: HooksAside = [dict(getattr(_module, name)) for name in GLOBAL_HOOKS]
    with hooks_put_back([{} for _ in before]):
        yield before


@contextlib.contextmanager
def hooks_put_back(aside: HooksAside) -> Iterator[None]:
    """Inside, these hooks run around every module's call, and no others."""
    found = [(getattr(_module, name), dict(getattr(_module, name))) for name in GLOBAL_HOOKS]
    for (hooks, _), wanted in zip(found, aside, strict=True):
        hooks.clear()
        hooks.update(wanted)
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.clear()
            hooks.update(before)


_CALL = nn.Module._call_impl.__code__
_FURTHEST = 8
"""Frames between a module's call and its forward: decorators, and what trainers wrap forward in."""


def called_module() -> nn.Module | None:
    """The module whose call the calling code is the forward of; None where none is near."""
    frame = sys._getframe(1)
    for _ in range(_FURTHEST):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code is _CALL:
            return frame.f_locals["self"]  # type: ignore[no-any-return]
    return None


def active_ddp() -> Any:
    """The DistributedDataParallel in whose forward pass this code runs, or None."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    return None if module is None else module.DistributedDataParallel._get_active_ddp_module()


def flattened_by_fsdp(module: nn.Module) -> bool:
    """Whether the older FSDP has put views of its flat parameter in the places of a module's own parameters.

    What `torch.func.functional_call` puts there is no leaf either, and may be trained.
    """
    own = (p for p in parameters_of(module).values() if p is not None)
    return module.__dict__.get("_fsdp_use_orig_params") is False or any(not p.is_leaf and p._is_view() for p in own)


def sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether parameters of a module's own group are shards now, and not what fully_shard has gathered for a call."""
    return any(group.fsdp_params and not group.is_unsharded for group in _fsdp_groups(module))


def unreduced_by_fsdp(module: nn.Module) -> tuple[bool, list[torch.Tensor]]:
    """Whether fully_shard leaves the gradients of a module's own group unreduced, and those that it holds apart."""
    groups = _fsdp_groups(module)
    apart = [p.unsharded_accumulated_grad for group in groups for p in group.fsdp_params]
    return any(not group.reduce_grads for group in groups), [t for t in apart if t is not None]


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that fully_shard gathers and reduces together for a module itself."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    found = sharded is not None and isinstance(module, sharded)
    return list(module._get_fsdp_state()._fsdp_param_groups) if found else []  # type: ignore[operator]
