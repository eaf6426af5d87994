"""A training step watched from unit to unit: where its memory peaks, and how much of that is not the units' own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ..device import Interval, of
from ..errors import CaptureError
from ..planning.allot import Option, Place
from ..training.planned import Planned

Pass: TypeAlias = Literal["forward", "backward", "weight", "between"]


TRIALS = 3
"""Steps of ranks that are watched on the CPU: threads of gloo free some messages, of which the allocator tells nobody,
so that these seem to stay."""


class Stretch(NamedTuple):
    """A stretch of a step: a pass of a unit, or what lies between two of them (`unit` is -1).

    `peak_bytes` is above what was there before the step.
    """

    kind: Pass
    unit: int
    peak_bytes: int


class Trace:
    """The allocator's events of one step, cut where units begin and end."""

    def __init__(self, device: torch.device) -> None:
        self._watch = of(device).watch()
        self._trials = TRIALS if device.type == "cpu" and dist.is_available() and dist.is_initialized() else 1

    def least(self, run: Callable[[], Any], clear: Callable[[], None]) -> list[Stretch]:
        """As `watch`, but of several steps the least in each stretch; `clear` is called before each."""
        seen = []
        for _ in range(self._trials):
            clear()
            gc.collect()
            seen.append(self.watch(run))
        return [min(same, key=lambda stretch: stretch.peak_bytes) for same in zip(*seen, strict=True)]

    def watch(self, run: Callable[[], Any]) -> list[Stretch]:
        """Run a step whose units' plans are `marked`, and say what was seen."""
        self._watch.start()
        try:
            result = run()
        finally:
            seen = self._watch.stop("between -1")
        del result
        return [_stretch(part) for part in seen]

    def marked(self, planned: Planned, unit: int) -> Planned:
        """A plan that tells when its passes begin and end."""

        def backward(function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
            self.cut("between")
            gradients = function(args)
            self.cut("backward", unit)
            return gradients

        def run(*given: Any) -> Any:
            self.cut("between")
            output = planned.run(*given, around=backward)
            self.cut("forward", unit)
            return output

        return replace(planned, run=run)

    def around_second_half(self, unit: int) -> Callable[[Callable[[], None]], None]:
        """What tells when the second halves of a unit's backward passes begin and end."""

        def around(run: Callable[[], None]) -> None:
            self.cut("between")
            run()
            self.cut("weight", unit)

        return around

    def cut(self, kind: Pass, unit: int = -1) -> None:
        """What has been since the last cut was this."""
        self._watch.cut(f"{kind} {unit}")


def _stretch(part: Interval) -> Stretch:
    kind, unit = part.label.split()
    return Stretch(kind, int(unit), part.peak_bytes)  # type: ignore[arg-type]


class Rest(NamedTuple):
    """What a model needs besides its units: their order, the most while none is held, and the rest around each."""

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
