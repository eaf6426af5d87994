"""The first step by a plan checks itself: the peak by the allocator's own events against the predicted one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from remat_ir import readable

from .. import _compat
from ..capture.operations import Kind
from ..profiling.measure import Lifetimes, Window
from .planned import Planned
from .reserved import device_of_step

log = logging.getLogger("remat")

TOLERANCE = 0.03
SMALLEST_BYTES = 16 * 1024
"""Differences below this are no news, however small the step."""

ATTEMPTS = 2
"""Libraries allocate once what they use ever after: a first step that is off is measured once more."""


class StepPeak(NamedTuple):
    """A step's peak as predicted and as measured, in bytes above the fixed ones."""

    predicted_bytes: int
    measured_bytes: int

    @property
    def off(self) -> float:
        """measured / predicted − 1."""
        return self.measured_bytes / max(1, self.predicted_bytes) - 1

    @property
    def as_predicted(self) -> bool:
        """Whether the two differ by no more than 3 %, or by next to nothing."""
        difference = abs(self.measured_bytes - self.predicted_bytes)
        return difference <= max(TOLERANCE * self.predicted_bytes, SMALLEST_BYTES)


class SelfCheck:
    """Which plans have still to show their peak, and what those that have came to.

    A step is watched while its own forward and its own backward function run, from this thread, and not in between:
    what the caller's loss allocates is the caller's. A step that never runs backward says nothing.
    """

    def __init__(self) -> None:
        # weakly: a plan that `most_plans` drops takes its traced graph with it
        self.due: MutableMapping[Planned, int] = WeakKeyDictionary()
        self.found: MutableMapping[Planned, StepPeak] = WeakKeyDictionary()

    def expect(self, planned: Planned) -> None:
        """A plan is about to be run for the first time."""
        self.due[planned] = ATTEMPTS

    def forget(self, planned: Planned) -> None:
        """A plan will not be run again."""
        self.due.pop(planned, None)
        self.found.pop(planned, None)

    def watch(self, planned: Planned, run: Callable[..., Any]) -> Any:
        """What a call by a plan gives; its peak, and that of the backward pass to come, are measured.

        Args:
            run: makes the call; with `around`, as for `StepFunction`.
        """
        if _compat.recording():  # the caller's own profiler; a later step is enough
            return run()
        window = Lifetimes() if _freed_elsewhere(planned) else Window(device_of_step(planned.step).device)
        tangents = len(planned.step.operations.flow.tangents)

        def backward(function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
            given = (a for a in args[len(args) - tangents :] if isinstance(a, torch.Tensor))
            if _compat.recording() or any(map(_compat.is_batched, given)):
                return function(args)
            arrived = _taken_in(args, tangents, window)
            window.open()
            try:
                return function(args)
            finally:
                after = window.close()
                start = before.left_bytes + arrived
                copied = start + after.left_bytes + _largest_copy(planned)
                self._tell(planned, max(before.peak_bytes, start + after.peak_bytes, copied))

        window.open()
        try:
            return run(around=backward)
        finally:
            before = window.close()

    def _tell(self, planned: Planned, measured: int) -> None:
        left = self.due.pop(planned, 0) - 1
        if left < 0:
            return
        peak = StepPeak(planned.activation_bytes, measured)
        self.found[planned] = peak
        said = (readable(measured), readable(peak.predicted_bytes), 100 * peak.off)
        if peak.as_predicted:
            log.info("the first step peaked at %s above what is there throughout, as planned (%s)", *said[:2])
        elif left:
            self.due[planned] = left
        else:
            log.warning(
                "a step by the plan peaks at %s above what is there throughout, and %s was predicted (%+.1f %%): the "
                "budget may not hold. Look for hooks that keep tensors, and for profiles from another machine; a "
                "larger slack= leaves room",
                *said,
            )


def _freed_elsewhere(planned: Planned) -> bool:
    """Whether threads of a backend free what the step's collectives have used, of which a CPU's allocator tells others
    nothing."""
    kernels = planned.step.operations.flow.kernels
    on_cpu = device_of_step(planned.step).device.type == "cpu"
    return on_cpu and any(_compat.is_collective(node.target) for node in kernels)


def _taken_in(args: list[Any], tangents: int, window: Window | Lifetimes) -> int:
    """The bytes of the incoming gradients.

    The CPU's allocator tells when a block is freed only if it was told when the block was made: each gradient is
    replaced by a copy made in a window.
    """
    found: dict[int, int] = {}
    for position in range(len(args) - tangents, len(args)):
        if not isinstance(args[position], torch.Tensor):  # the mesh of a DTensor
            continue
        if args[position].device.type == "cpu":
            window.open()
            args[position] = args[position].clone()
            window.close()
        found[_compat.storage_key(args[position])] = args[position].untyped_storage().nbytes()
    return sum(found.values())


def _largest_copy(planned: Planned) -> int:
    """Autograd copies some gradients, one at a time, after the backward function has returned."""
    ops = planned.step.operations
    return max((ops.sizes[s] for op in ops.ops if op.kind is Kind.ACCUMULATE for s in op.makes), default=0)


def summary(found: Mapping[Planned, StepPeak], planned: Planned) -> str:
    """What a plan's first step came to, in a line; empty before it has run."""
    peak = found.get(planned)
    if peak is None:
        return ""
    return f"first step: peak {readable(peak.measured_bytes)} above the fixed bytes, {100 * peak.off:+.1f} % measured"
