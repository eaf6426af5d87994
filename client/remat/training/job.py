"""What of a training job is there next to its forward and backward passes: optimizer, copies, gradients that stay."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from remat_ir import InvalidData, readable

from ..profiling.fixed import all_gradients, bucket_bytes, bytes_beside, existing_gradients, leaves_gradients
from ..profiling.optimizers import UpdateBlocks, UpdateMemory, check_optimizer, update_blocks, update_memory
from .backward import Delivery, Release

log = logging.getLogger("remat")

HELPS = ({"fused": True}, {"foreach": False})
"""Settings of an optimizer by which its step may take less memory, with the same results up to rounding."""


BUCKETS, VIEWED = "DDP's buckets", "DDP's buckets and gradients"
"""Fixed bytes of buckets, and of those that the gradients are views of (`gradient_as_bucket_view`)."""


@dataclass(frozen=True)
class Job:
    """A training job around a planned step; bytes are those on the device of the module.

    Attributes:
        optimizer: what steps, or None.
        ema: a module or tensors that are copies of the parameters, such as `torch.optim.swa_utils.AveragedModel`.
        accumulate: backward passes to a step of the optimizer.
        clip: whether gradients are clipped by their global norm before the step.
        releases: whether each parameter is updated inside the backward pass, and its gradient freed.

    Raises:
        InvalidData: not an optimizer, or no tensors.
    """

    optimizer: Any = None
    ema: nn.Module | Iterable[torch.Tensor] | None = None
    accumulate: int = 1
    clip: bool = False
    releases: bool = False
    _found: dict[Any, UpdateMemory] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.ema is None or isinstance(self.ema, nn.Module):
            return
        copies = tuple(self.ema) if isinstance(self.ema, Iterable) else (self.ema,)
        if not all(isinstance(tensor, torch.Tensor) for tensor in copies):
            raise InvalidData(f"ema must be a module or tensors, not {self.ema!r}")
        object.__setattr__(self, "ema", copies)

    def update(self, **settings: Any) -> UpdateMemory:
        """What the optimizer's step takes; found out once for what it trains and how."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        how = [(name, value) for group in groups for name, value in group.items() if isinstance(value, (bool, int))]
        what = [(p.shape, p.dtype, p.device, p.requires_grad) for group in groups for p in group["params"]]
        key = (*what, *how, *sorted(settings.items()))
        if key not in self._found:
            self._found[key] = update_memory(self.optimizer, self.clip, settings)
        return self._found[key]

    def blocks(self) -> UpdateBlocks:
        """What the optimizer's steps allocate, block by block."""
        return update_blocks(self.optimizer, self.update())

    def fixed(self, module: nn.Module) -> dict[str, int]:
        """Bytes that are there throughout a step of the module, by what they are."""
        update = self.update()
        buckets, views = bucket_bytes(module)
        found = {
            "gradients": self.gradients(module, self.accumulate > 1 or leaves_gradients(module)),
            BUCKETS: 0 if views else buckets,
            VIEWED: buckets if views else 0,
            "optimizer state": update.state_bytes,
            "EMA copies": 0 if self.ema is None else bytes_beside(self.ema, module),
            "optimizer step's temporaries": update.beside_passes_bytes,
        }
        optional = (BUCKETS, VIEWED, "EMA copies", "optimizer step's temporaries")
        return {name: size for name, size in found.items() if size or name not in optional}

    def gradients(self, module: nn.Module, stay: bool) -> int:
        """Bytes of gradients that are there before a step, apart from DDP's buckets.

        Args:
            stay: whether those of all parameters may be there, and not just the present ones.
        """
        buckets, views = bucket_bytes(module)
        found = max(existing_gradients(module), all_gradients(module) if stay else 0)
        return max(0, found - buckets) if views else found

    @cached_property
    def release(self) -> Release | Delivery | None:
        """What takes gradients inside the backward pass: the optimizer, or hooks that the parameters may have."""
        if self.releases:
            return Release(self.optimizer)
        return Delivery() if self.accumulate == 1 and not self.clip else None

    def advice(self, over: int) -> str:
        """What would make the optimizer's step smaller by so many bytes, as a sentence; what is best, if nothing is."""
        if self.optimizer is None:
            return ""
        now, found = self.update().temporaries_bytes, []
        for settings in HELPS:
            if not any(name in group for group in self.optimizer.param_groups for name in settings):
                continue
            less = now - self.update(**settings).temporaries_bytes
            if less > 0:
                name = ", ".join(f"{key}={value}" for key, value in settings.items())
                enough = "" if less >= over else ", which is not enough"
                found.append(f"{name} takes {readable(less)} less{enough}")
        return "; ".join(found) or "no implementation of its step takes less: release gradients, or shard its state"


def warn_of_update(job: Job, peak: int, budget: int) -> None:
    """Log that the optimizer's own step is over a budget: no plan of activations helps there."""
    if job.optimizer is not None and peak > budget:
        log.warning(
            "the optimizer's own step needs %s, over the budget of %s, whatever is computed again: %s",
            readable(peak),
            readable(budget),
            job.advice(peak - budget),
        )
