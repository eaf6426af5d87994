"""Optimizers: a twin that steps other tensors by the same settings, and what `foreach=None` stands for."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from .versions import lacking, require

__all__ = ["STEP_HOOKS", "chooses_foreach", "stand_in"]

STEP_HOOKS = frozenset({"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
"""Where an optimizer keeps the hooks around its step."""

require(lacking(((_get_foreach_kernels_supported_devices, ()),), ()))
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
