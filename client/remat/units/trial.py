"""A training step watched from unit to unit: where its memory peaks, and how much of that is not the units' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from .. import _compat
from ..errors import CaptureError
from ..profiling.measure import Window
from ..training.planned import Planned
from .allot import Option, Place

Pass: TypeAlias = Literal["forward", "backward", "between"]


class Stretch(NamedTuple):
    """A stretch of a step: a pass of a unit, or what lies between two of them (`unit` is -1).

    `peak_bytes` is above what was there before the step.
    """

    kind: Pass
    unit: int
    peak_bytes: int


class Trace:
    """The allocator's events of one step, cut where units begin and end.

    CPU: one recording with marks in it, since autograd gives each node of a backward pass the profiler that there was
    when it began. CUDA: max_memory_allocated, whose peak is reset at each cut.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None
        self.window = Window(device)
        self.now = 0
        self.stretches: list[Stretch] = []

    def watch(self, run: Callable[[], Any]) -> list[Stretch]:
        """Run a step whose units' plans are `marked`, and say what was seen."""
        if self.cuda is None:
            _compat.start_recording()
            try:
                result = run()
            finally:
                events = _compat.stop_marked_recording()
            self._read([*events, "between -1"])
        else:
            self.window.open()
            result = run()
            self._close("between", -1)
        del result
        return self.stretches

    def marked(self, planned: Planned, unit: int) -> Planned:
        """A plan that tells when its passes begin and end."""

        def run(*tensors: Any, **kwargs: Any) -> Any:
            self.cut("between")
            output = planned.run(*tensors, **kwargs)
            self.cut("forward", unit)
            planned.around[:] = [backward]
            return output

        def backward(function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
            self.cut("between")
            gradients = function(args)
            self.cut("backward", unit)
            return gradients

        return replace(planned, run=run)

    def cut(self, kind: Pass, unit: int = -1) -> None:
        """What has been since the last cut was this."""
        if self.cuda is None:
            _compat.mark(f"{kind} {unit}")
        else:
            self._close(kind, unit)
            self.window.open()

    def _close(self, kind: Pass, unit: int) -> None:
        peak = self.window.close()
        self.stretches.append(Stretch(kind, unit, self.now + peak.peak_bytes))
        self.now += peak.left_bytes

    def _read(self, events: Sequence[int | str]) -> None:
        worst = 0
        for event in events:
            if isinstance(event, int):
                self.now += event
                worst = max(worst, self.now)
            else:
                kind, unit = event.split()
                self.stretches.append(Stretch(kind, int(unit), worst))  # type: ignore[arg-type]
                worst = self.now


class Rest(NamedTuple):
    """What a model needs beside its units: their order, the most while none is held, and the rest around each."""

    order: tuple[int, ...]
    before_bytes: int
    places: tuple[Place, ...]


def rest_of(stretches: Sequence[Stretch], plans: Sequence[Option], names: Sequence[str]) -> Rest:
    """What the stretches of a step leave when the units' own bytes, by the plans that they ran by, are taken off.

    Raises:
        CaptureError: a unit did not run once forward and once backward, or the passes are not nested.
    """
    held, before = 0, 0
    stack: list[int] = []
    order: list[int] = []
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    after: dict[int, int] = {}
    for kind, unit, peak in stretches:
        if kind == "between" and stack:
            after[stack[-1]] = max(peak - held, after.get(stack[-1], peak - held))
        elif kind == "between":
            before = max(before, peak)
        elif kind == "forward":
            if unit in forward:
                raise CaptureError(f"{names[unit]} runs twice in one step, which a budget for units cannot follow yet")
            forward[unit] = peak - held - plans[unit].forward_bytes
            held += plans[unit].held_bytes
            stack.append(unit)
            order.append(unit)
        else:
            if not stack or stack.pop() != unit:
                raise CaptureError(
                    f"the backward pass of {names[unit]} does not come in the reverse order of the forward passes, so "
                    "what the units hold together cannot be told from what each of them holds"
                )
            held -= plans[unit].held_bytes
            backward[unit] = peak - held - plans[unit].backward_bytes
    missing = [name for unit, name in enumerate(names) if unit not in backward]
    if missing:
        raise CaptureError(f"{missing[0]} does not run forward and backward in a training step of the model")
    return Rest(tuple(order), before, tuple(Place(forward[u], backward[u], after[u]) for u in order))
