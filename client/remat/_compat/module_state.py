"""The state of modules and optimizers: where torch's classes, and the wrappers that are modules, keep it."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _module
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from .versions import require


def _nothing(*_: Any) -> None:
    """A hook that is registered to see where it is put."""


def _places() -> tuple[str, ...]:
    """Under which names the `__dict__` of a module has what is registered on it; "" where it has it nowhere."""
    probe = nn.Module()
    probe.register_parameter("parameter", None)
    probe.register_buffer("buffer", None)
    probe.register_module("module", None)
    held: tuple[dict[str, None], ...] = ({"parameter": None}, {"buffer": None}, {"module": None})
    put = [next((key for key, value in vars(probe).items() if value == one), "") for one in held]
    for register in (
        probe.register_forward_hook,
        probe.register_forward_pre_hook,
        probe.register_full_backward_hook,
        probe.register_full_backward_pre_hook,
    ):
        hooks = register(_nothing).hooks_dict_ref()
        put.append(next((key for key, value in vars(probe).items() if value is hooks), ""))
    return tuple(put)


_PLACES = _places()
PARAMETERS, BUFFERS, MODULES = _PLACES[:3]
"""The dictionaries of a module itself, in its `__dict__`. What is looked at before every step reads them there:
`named_parameters` and its like walk and name the whole tree, and give no way to put a tensor in another's place."""

CALL_HOOKS = _PLACES[3:]
"""The hooks that run around a module's call."""

FORWARD_HOOKS, FORWARD_PRE_HOOKS = CALL_HOOKS[:2]

MODULES_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""What nn.Module itself keeps on each module, but for its train mode."""

GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
"""The hooks that run around every module's call: to register one would decide of which kind the caller's may be."""

require([] if all(_PLACES) else ["the dictionaries of what is registered on a module"])
require([name for name in GLOBAL_HOOKS if not hasattr(_module, name)])


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, to be read and replaced."""
    parameters: dict[str, nn.Parameter | None] = module.__dict__[PARAMETERS]
    return parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """A module's own buffers by name, to be read and replaced."""
    buffers: dict[str, Any] = module.__dict__[BUFFERS]
    return buffers


def global_hooks() -> tuple[Any, ...]:
    """The hooks that run around every module's call, in order."""
    return tuple(hook for name in GLOBAL_HOOKS for hook in getattr(_module, name).values())


_CALL = nn.Module.__call__.__code__
_FURTHEST = 10
"""Frames from here to a module's call: decorators of its forward, and what trainers wrap that in."""


def called_module() -> nn.Module | None:
    """The module whose call the calling code is the forward of; None where none is near."""
    frame = inspect.currentframe()
    for _ in range(_FURTHEST):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return None
        if frame.f_code is _CALL:
            module: nn.Module = frame.f_locals["self"]
            return module
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


STEP_HOOKS = frozenset({"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
"""Where an optimizer keeps the hooks around its step."""

require([name for name in sorted(STEP_HOOKS) if name not in torch.optim.SGD([torch.zeros(0)]).__dict__])


def stand_in(optimizer: Any) -> Any:
    """An optimizer of the same class, settings and own attributes, without state and without the caller's hooks.

    Its parameter groups are those of the original: whoever asked for it replaces them.
    """
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.update({name: OrderedDict() for name in STEP_HOOKS})
    made.state = defaultdict(dict)
    return made


def chooses_foreach(parameters: Sequence[torch.Tensor], differentiable: bool) -> bool:
    """Whether torch's optimizers take the foreach implementation for these parameters where nothing is said.

    Fake ones stand for real ones of their device; torch itself takes it for real ones alone.
    """
    stood_for = [torch.nn.Parameter if isinstance(p, FakeTensor) else type(p) for p in parameters]
    known = all(kind in _foreach_supported_types for kind in stood_for)
    there = _get_foreach_kernels_supported_devices()
    return known and not differentiable and all(p.device.type in there for p in parameters)
