"""What a collective costs, by a model that is the same on all ranks: none is launched to be timed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import fx

from .. import _compat
from ..capture.dataflow import tensors
from ..capture.operations import Measured
from ..device import storage_bytes
from ..errors import CaptureError
from .timing import rounded

LATENCY_NS = {"cpu": 50_000}
BYTES_PER_US = {"cpu": 1_000}
"""Of a link, by kind of device: sockets between hosts' memories."""

ACCELERATOR_LATENCY_NS = 20_000
ACCELERATOR_BYTES_PER_US = 50_000
"""Of a link between accelerators."""


def modelled_collective(node: fx.Node) -> Measured:
    """Time in ns and workspace in bytes of a collective: latency, and what a rank sends over one link.

    A ring of many ranks sends what is gathered, scattered or sent once, and what is reduced on all ranks twice. A wait
    costs nothing of its own. What the backend allocates for itself is not counted.
    """
    assert isinstance(node.target, _compat.OpOverload)
    name = _compat.operator_name(node.target)
    if "wait" in name:
        return Measured(1, 0)
    read = [t for argument in node.all_input_nodes for t in tensors(argument.meta.get("val"))]
    made = list(tensors(node.meta.get("val")))
    size = max(sum(map(storage_bytes, read)), sum(map(storage_bytes, made)))
    device = next((t.device.type for t in (*made, *read)), "cpu")
    rate = BYTES_PER_US.get(device, ACCELERATOR_BYTES_PER_US)
    times = 2 if "reduce" in name and "scatter" not in name else 1
    return Measured(rounded(LATENCY_NS.get(device, ACCELERATOR_LATENCY_NS) + times * size * 1000 // rate), 0)


def no_collectives(what: str) -> AbstractContextManager[Any]:
    """While this holds in a job of several ranks, a collective is refused before it is launched; `what` is measured.

    Raises:
        CaptureError: by what runs inside.
    """
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return nullcontext() if alone else _NoCollectives(what)


class _NoCollectives(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A collective launched on one rank would pair with one of another rank's training."""

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _compat.is_collective(func):
            raise CaptureError(
                f"{self.what} calls the collective {func}, and is measured by running it: launched on one rank it "
                "would pair with another rank's training; use mode='graph', which models what collectives cost and "
                "does not run what hides them in an operator, unless functional_ops names it"
            )
        if not _compat.is_known(func):
            return _compat.run_watched(func, args, kwargs or {}, self)
        return func(*args, **(kwargs or {}))
