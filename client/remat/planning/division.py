"""One budget divided over the calls of a step: the plan of each, at the least total cost.

Each moment of the step gives one inequality: what the calls outstanding then hold, what the one that runs needs, and
what else is there come to no more than the budget (`divide`). HiGHS solves that where it is installed. Without it,
nested passes, forward in order and backward in reverse, are divided by an exact dynamic program over the bytes that the
calls before one hold (`allot`), and others greedily.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

log = logging.getLogger("remat")

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


def allot(places: Sequence[Place], options: Sequence[Sequence[Option]], budget_bytes: int) -> list[int] | None:
    """The option of each unit at the least total cost, such that the peak is within the budget; None: there is none."""
    states: list[State] = [(0, 0, None)]
    for place, ways in zip(places, options, strict=True):
        found: list[State] = [
            (held + way.held_bytes, cost + way.cost_ns, (index, past))
            for held, cost, past in states
            for index, way in enumerate(ways)
            if held + place.forward_bytes + way.forward_bytes <= budget_bytes
            and held + place.backward_bytes + way.backward_bytes <= budget_bytes
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


def least_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The least budget between two that fits, to within a thousandth; the high one does."""
    while high - low > max(1, abs(high) // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


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


Pass: TypeAlias = Literal["forward", "backward", "between"]

Stack: TypeAlias = tuple[int, ...]
"""A call: the numbers of the graphs of the calls that were outstanding when it began, the oldest first, and its own."""

SECONDS = 5.0
"""For one division."""

GAP = 1e-3
"""Of a division's cost, over the least."""

SCALE = 1e-3
"""Bytes and nanoseconds are counted in thousands: numbers of one size are what a solver is exact with."""


class Row(NamedTuple):
    """A moment of a step.

    Attributes:
        kind: what runs: a pass of a call, or what lies between two of them.
        call: the call whose pass it is; None between passes.
        held: the calls that are outstanding besides.
        rest_bytes: the most that is there besides what the plans of all of these say; below 0 where they say too much.
    """

    kind: Pass
    call: Stack | None
    held: tuple[Stack, ...]
    rest_bytes: int

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The calls in it."""
        return (*self.held, *([] if self.call is None else [self.call]))

    def bytes_by(self, chosen: Mapping[Stack, Option]) -> int:
        """What is there, in bytes above the fixed ones, by one option for each call."""
        return (
            self.rest_bytes
            + sum(chosen[each].held_bytes for each in self.held)
            + (0 if self.call is None else self.own(chosen[self.call]))
        )

    def own(self, option: Option) -> int:
        """What the call that runs needs by an option."""
        return option.forward_bytes if self.kind == "forward" else option.backward_bytes


def peak_by(rows: Sequence[Row], chosen: Mapping[Stack, Option]) -> int:
    """The most that is there at any moment."""
    return max((row.bytes_by(chosen) for row in rows), default=0)


def divide(
    rows: Sequence[Row], options: Mapping[Stack, Sequence[Option]], budget_bytes: int
) -> dict[Stack, int] | None:
    """The option of each call at the least total cost within a budget; None: no choice has been found.

    Args:
        options: of each call that is in a row.
    """
    weights = {call: max(1, sum(r.call == call and r.kind == "forward" for r in rows)) for call in options}
    try:
        return _solved(rows, options, weights, budget_bytes)
    except ImportError:
        log.info("HiGHS is not installed: the budget is divided without it")
    nested = _nested(rows, options)
    if nested is None:
        return _greedy(rows, options, weights, budget_bytes)
    order, places = nested
    if any(row.kind == "between" and not row.held and row.rest_bytes > budget_bytes for row in rows):
        return None
    chosen = allot(places, [options[call] for call in order], budget_bytes)
    return None if chosen is None else dict(zip(order, chosen, strict=True))


def least_bytes(rows: Sequence[Row], options: Mapping[Stack, Sequence[Option]]) -> int:
    """A budget that some choice fits, the least to within a thousandth."""
    high = peak_by(rows, {call: min(ways) for call, ways in options.items()})
    low = min((row.rest_bytes for row in rows), default=0)
    return least_that_fits(low, high, lambda budget: divide(rows, options, budget) is not None)


def _solved(
    rows: Sequence[Row],
    options: Mapping[Stack, Sequence[Option]],
    weights: Mapping[Stack, int],
    budget_bytes: int,
) -> dict[Stack, int] | None:
    """By an integer program of one choice for each call.

    Raises:
        ImportError: HiGHS is not installed.
    """
    import highspy

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    column = {key: n for n, key in enumerate((call, i) for call, ways in options.items() for i in range(len(ways)))}
    solver.addVars(len(column), [0.0] * len(column), [1.0] * len(column))
    for (call, i), n in column.items():
        solver.changeColIntegrality(n, highspy.HighsVarType.kInteger)
        solver.changeColCost(n, options[call][i].cost_ns * weights[call] * SCALE)

    def add(low: float, high: float, entries: Mapping[int, float]) -> None:
        solver.addRow(low, high, len(entries), list(entries), list(entries.values()))

    for call, ways in options.items():
        add(1, 1, {column[call, i]: 1.0 for i in range(len(ways))})
    for row in dict.fromkeys(rows):
        entries: defaultdict[int, float] = defaultdict(float)
        for call in row.held:
            for i, way in enumerate(options[call]):
                entries[column[call, i]] += way.held_bytes * SCALE
        if row.call is not None:
            for i, way in enumerate(options[row.call]):
                entries[column[row.call, i]] += row.own(way) * SCALE
        if not entries and row.rest_bytes > budget_bytes:
            return None
        add(-highspy.kHighsInf, (budget_bytes - row.rest_bytes) * SCALE, entries)
    solver.setOptionValue("time_limit", SECONDS)
    solver.setOptionValue("mip_rel_gap", GAP)
    solver.setOptionValue("threads", 1)
    solver.run()
    values = solver.getSolution().col_value
    if not len(values):
        return None
    chosen = {call: max(range(len(ways)), key=lambda i: values[column[call, i]]) for call, ways in options.items()}
    # a solver's numbers are rounded: what it says is checked
    fits = peak_by(rows, {call: options[call][i] for call, i in chosen.items()}) <= budget_bytes
    return chosen if fits else _greedy(rows, options, weights, budget_bytes)


def _nested(rows: Sequence[Row], options: Mapping[Stack, Sequence[Option]]) -> tuple[list[Stack], list[Place]] | None:
    """The calls in order and what is around them, where the passes are nested: each call holds what it holds from its
    forward to its backward pass, and these come in the opposite order. None: they are not."""
    forward = [(row.call, row.held) for row in rows if row.kind == "forward" and row.call is not None]
    order = list(dict.fromkeys(call for call, _ in sorted(forward, key=lambda each: len(each[1]))))
    before = {call: tuple(order[:n]) for n, call in enumerate(order)}
    if set(order) != set(options) or any(held != before[call] for call, held in forward):
        return None
    if any(row.call is not None and row.held != before.get(row.call) for row in rows):
        return None
    stacks = {(*held, call): call for call, held in before.items()} | {(): None}
    if any(row.held not in stacks for row in rows):
        return None

    def most(kind: Pass, call: Stack) -> int:
        found = [
            r.rest_bytes for r in rows if r.kind == kind and (stacks[r.held] if kind == "between" else r.call) == call
        ]
        return max(found, default=0)

    return order, [Place(most("forward", c), most("backward", c), most("between", c)) for c in order]


def _greedy(
    rows: Sequence[Row],
    options: Mapping[Stack, Sequence[Option]],
    weights: Mapping[Stack, int],
    budget_bytes: int,
) -> dict[Stack, int] | None:
    """From what holds least, the change that saves most for each byte it adds at the peak, as long as one fits."""
    chosen = {call: min(range(len(ways)), key=lambda i: ways[i]) for call, ways in options.items()}

    def peak() -> int:
        return peak_by(rows, {call: options[call][i] for call, i in chosen.items()})

    if peak() > budget_bytes:
        return None
    while True:
        best: tuple[float, Stack, int] | None = None
        for call, ways in options.items():
            now = chosen[call]
            for i, way in enumerate(ways):
                saved = (ways[now].cost_ns - way.cost_ns) * weights[call]
                rate = saved / max(1, way.held_bytes - ways[now].held_bytes)
                if saved <= 0 or (best is not None and rate <= best[0]):
                    continue
                chosen[call] = i
                if peak() <= budget_bytes:
                    best = rate, call, i
                chosen[call] = now
        if best is None:
            return chosen
        chosen[best[1]] = best[2]
