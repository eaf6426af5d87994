"""What a rank of a pipeline has there throughout, as it is once the schedule has run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _compat
from ..capture.dataflow import tensors
from ..device import storage_bytes
from ..profiling.fixed import all_gradients, resident
from ..training.job import Job


class Standing(NamedTuple):
    """Bytes of a rank: those that are there throughout, and what a step of the schedule leaves besides."""

    fixed_bytes: int
    left_bytes: int


def standing(stages: Sequence[Any], model: nn.Module, job: Job, given: Any) -> Standing:
    """What is there after a step of a schedule.

    Args:
        stages: those of torch.
        model: their modules.
        given: the batch, positional arguments and others.
    """
    left = _bytes(tensors([stage.output_chunks for stage in stages])) + all_gradients(model)
    parts = {**resident(model, given, {}), **job.fixed(model)}
    buffers = _bytes(_buffers(stages), tensors(given))
    return Standing(sum(size for name, size in parts.items() if name != "gradients") + buffers, left)


def _bytes(found: Iterable[Any], seen: Iterable[torch.Tensor] = ()) -> int:
    """Of the storages of tensors, but for those that were seen."""
    sizes = {_compat.storage_key(t): storage_bytes(t) for t in found if isinstance(t, torch.Tensor)}
    return sum(sizes[key] for key in set(sizes) - {_compat.storage_key(t) for t in seen})


def _buffers(stages: Sequence[Any]) -> list[Any]:
    """What the stages receive into, which stays from step to step."""
    infos = [one for s in stages for one in (*s.args_recv_info.values(), *s.grad_recv_info.values())]
    return [getattr(info, "buffer", None) for one in infos for info in one]
