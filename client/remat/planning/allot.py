"""One budget for units that run one after the other: which of its plans each unit takes, at the least total cost.

The forward passes of the units run in order and their backward passes in reverse, so what unit k has next to it is what
the units before it hold from their forward to their backward passes. An exact dynamic program over that sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Chosen: TypeAlias = tuple[int, "Chosen | None"]
"""The option of a unit, and those of the units before it."""

State: TypeAlias = tuple[int, int, Chosen | None]
"""The bytes that are held after some units, what they cost, and their options."""

MOST_STATES = 4096
"""Beyond this many undominated sums, those that lie within a share of the budget of each other are taken for one."""


class Option(NamedTuple):
    """One plan of a unit: the bytes that it holds between its passes, its peak in each, and what it costs.

    The last four tell the passes of a pipeline's stage apart: what of the cost is the forward pass's and, where the
    backward pass is in halves, the second half's; what is held between the halves, and the second one's peak.
    """

    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    cost_ns: int
    forward_ns: int = 0
    weight_ns: int = 0
    between_bytes: int = 0
    weight_bytes: int = 0


class Place(NamedTuple):
    """What there is in the model besides the units and what they hold, in bytes: around a unit and after it.

    Attributes:
        forward_bytes, backward_bytes: while this unit runs; below 0 where a plan counts what the model does not keep.
        after_bytes: the most while this unit is the last that is held, and none runs.
    """

    forward_bytes: int
    backward_bytes: int
    after_bytes: int


def peak_of(before_bytes: int, places: Sequence[Place], chosen: Sequence[Option]) -> int:
    """The peak of a choice, in bytes; `before_bytes` is the most while no unit is held."""
    held, worst = 0, before_bytes
    for place, option in zip(places, chosen, strict=True):
        worst = max(worst, _while_running(held, place, option))
        held += option.held_bytes
        worst = max(worst, held + place.after_bytes)
    return worst


def allot(places: Sequence[Place], options: Sequence[Sequence[Option]], budget_bytes: int) -> list[int] | None:
    """The option of each unit at the least total cost, such that the peak is within the budget; None: there is none."""
    states: list[State] = [(0, 0, None)]
    for place, ways in zip(places, options, strict=True):
        found: list[State] = [
            (held + way.held_bytes, cost + way.cost_ns, (index, past))
            for held, cost, past in states
            for index, way in enumerate(ways)
            if _while_running(held, place, way) <= budget_bytes
            and held + way.held_bytes + place.after_bytes <= budget_bytes
        ]
        states = _undominated(found, budget_bytes)
    if not states:
        return None
    past = min(states, key=lambda state: (state[1], state[0]))[2]
    chosen: list[int] = []
    while past is not None:
        index, past = past
        chosen.append(index)
    return chosen[::-1]


def least_budget(before_bytes: int, places: Sequence[Place], options: Sequence[Sequence[Option]]) -> int:
    """The least budget that some choice fits, to within a thousandth."""
    low, high = before_bytes, max(before_bytes, peak_of(before_bytes, places, [min(ways) for ways in options]))
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if allot(places, options, middle) is not None else (middle, high)
    return high


def _while_running(held: int, place: Place, option: Option) -> int:
    return held + max(place.forward_bytes + option.forward_bytes, place.backward_bytes + option.backward_bytes)


def _undominated(states: list[State], budget_bytes: int) -> list[State]:
    kept: list[State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    if len(kept) <= MOST_STATES:
        return kept
    width = max(1, budget_bytes // MOST_STATES)
    # the last of a stretch holds the most and costs the least; what it holds stays exact
    return list({state[0] // width: state for state in kept}.values())
