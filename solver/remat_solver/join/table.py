"""The optimal schedule of a join network (RR-9273, Theorem 3), counted in forward steps: all else runs exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from remat_ir import JoinPlan, JoinStep, JoinVerb

from .._numba import kernel
from ..deadline import look, never

NEVER = 1 << 30
MOST_STATES = 120_000_000
"""Entries of four bytes that a table may have."""

MOST_WORK = 2e10
"""Comparisons that filling a table may take: about half a minute."""

_ENTRIES = 1 << 14
"""Entries that are filled between two looks at the clock."""

Array = Any


@kernel(nogil=True)
def _fill_chain(table: Array, c: int) -> None:
    for l in range(table.shape[1]):  # noqa: E741
        best = 0 if l == 0 and c >= 2 else NEVER
        if c >= 3:
            for i in range(1, l + 1):
                best = min(best, i + table[c - 1, l - i] + table[c, i - 1])
        table[c, l] = best


def chain_steps(longest: int, most_slots: int, stop: Callable[[], bool] = never) -> Any:
    """[slots + 1, longest + 1] the fewest forward steps that reverse a chain of size l in c slots (RR-9273, Theorem 1).

    x_0 and x̄_(l+1) are in memory at the start, x̄_0 at the end. The minimum of eq. (3) is over 1 ≤ i ≤ l.
    Where `stop` says so, `TimeUp` is raised.
    """
    table = np.empty((most_slots + 1, longest + 1), np.int32)
    for c in range(most_slots + 1):
        look(stop)
        _fill_chain(table, c)
    return table


@kernel(nogil=True)
def _fill_join(branches: int, radix: int, table: Array, chain: Array, c: int, kept: int, first: int, end: int) -> None:
    """Fill [c, kept, first to end - 1]: the last `kept` branches have b = 1, and the lengths are the digits of the
    third index to the base `radix`. What has one slot less must be there.
    """
    digits = np.zeros(branches, np.int64)
    weight = np.array([radix**j for j in range(branches)])
    for state in range(first, end):
        rest = state
        for j in range(branches):
            digits[j] = rest % radix
            rest //= radix
        best = NEVER
        if state == 0:
            best = 0 if c >= branches else NEVER
        elif c > 0:
            for m in range(branches):
                length = digits[m]
                fresh = m < branches - kept
                free = c - kept if fresh else c - kept + 1
                if length == 0 or free < 2:
                    continue
                # a branch that is kept for the first time moves to the last place of those that are not
                place = branches - kept - 1 if fresh else m
                base = state - length * weight[m]
                if fresh:
                    base += digits[place] * (weight[m] - weight[place])
                    if place == m:
                        base = state - length * weight[m]
                after = kept + 1 if fresh else kept
                for i in range(1, length + 1):
                    value = i + table[c - 1, after, base + (length - i) * weight[place]]
                    value += chain[free, i - 1]
                    best = min(best, value)
        table[c, kept, state] = best


def states(lengths: tuple[int, ...], slots: int) -> int:
    """How many entries the table of a join has."""
    return int((slots + 1) * (len(lengths) + 1) * (max(lengths) + 1) ** len(lengths))


def in_reach(lengths: tuple[int, ...], slots: int, most_work: float = MOST_WORK) -> bool:
    """Whether the table of a join has at most `MOST_STATES` entries and takes at most so many comparisons."""
    c = min(slots, sum(lengths) + len(lengths) + 1)
    entries = states(lengths, c)
    return entries <= MOST_STATES and entries * sum(lengths) / 2 <= most_work


class JoinTable:
    """The fewest forward steps for every number of slots up to c, every shorter join and every b (RR-9273, Theorem 3).

    Branches are interchangeable, so those with b = 1 are kept sorted to the end (the Remark after the theorem).

    Args:
        stays: b of each branch at the start; none by default.

    Raises:
        ValueError: the table would have more than MOST_STATES entries.
        TimeUp: `stop`, which is asked all the time, said so.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        slots: int,
        stays: tuple[bool, ...] = (),
        stop: Callable[[], bool] = never,
    ) -> None:
        self.lengths, self.stays = lengths, stays or (False,) * len(lengths)
        # with every x_i in memory nothing is left to gain
        self.slots = min(slots, sum(lengths) + len(lengths) + 1)
        if states(lengths, self.slots) > MOST_STATES:
            raise ValueError(f"the program for lengths {lengths} and {self.slots} slots is out of reach")
        radix = max(lengths) + 1
        self._chain = chain_steps(max(lengths), self.slots + 1, stop)
        size = radix ** len(lengths)
        self._table = np.empty((self.slots + 1, len(lengths) + 1, size), np.int32)
        for c in range(self.slots + 1):
            for kept in range(len(lengths) + 1):
                for first in range(0, size, _ENTRIES):
                    look(stop)
                    end = min(first + _ENTRIES, size)
                    _fill_join(len(lengths), radix, self._table, self._chain, c, kept, first, end)

    def forward_steps(self, slots: int) -> int | None:
        """The fewest forward steps with so many slots, or None where there are too few."""
        value = self._sorted(min(slots, self.slots), list(self.lengths), list(self.stays))
        return None if value >= NEVER else value

    def _value(self, slots: int, kept: int, lengths: tuple[int, ...]) -> int:
        radix = max(self.lengths) + 1
        return int(self._table[slots, kept, sum(length * radix**j for j, length in enumerate(lengths))])

    def plan(self, slots: int) -> JoinPlan | None:
        """An optimal schedule in canonical form (RR-9273, Definition 8), or None where there are too few slots."""
        if self.forward_steps(slots) is None:
            return None
        c = min(slots, self.slots)
        left, kept = list(self.lengths), list(self.stays)
        segments: list[Segment] = []
        while any(left):
            branch, length = self._segment(c, left, kept)
            start = self.lengths[branch] - left[branch]
            segments.append(Segment(branch, start, length, c - sum(kept) + kept[branch], not kept[branch]))
            left[branch] -= length
            kept[branch] = True
            c -= 1
        return canonical_plan(segments, kept, self._chain)

    def _segment(self, c: int, left: list[int], kept: list[bool]) -> tuple[int, int]:
        """The branch m and the length i of eq. (5)'s minimum."""
        best, choice = NEVER, (-1, -1)
        for branch, length in enumerate(left):
            after = [stays or j == branch for j, stays in enumerate(kept)]
            free = c - sum(kept) + kept[branch]
            if free < 2:
                continue
            for i in range(1, length + 1):
                lengths = [x - (i if j == branch else 0) for j, x in enumerate(left)]
                value = i + self._sorted(c - 1, lengths, after) + int(self._chain[free, i - 1])
                if value < best:
                    best, choice = value, (branch, i)
        return choice

    def _sorted(self, c: int, lengths: list[int], kept: list[bool]) -> int:
        order = sorted(range(len(lengths)), key=lambda j: kept[j])
        return self._value(c, sum(kept), tuple(lengths[j] for j in order))


class Segment(NamedTuple):
    """Forward steps that a canonical schedule runs from a checkpoint to the next, and reverses in one go.

    Attributes:
        first, length: x_first is the checkpoint, and F_first … F_(first+length−1) the steps.
        slots: of the reversal.
        opens: whether it is the first of a branch whose x̄_0 is discarded in the end.
    """

    branch: int
    first: int
    length: int
    slots: int
    opens: bool


def canonical_plan(segments: Sequence[Segment], kept: Sequence[bool], chain: Array) -> JoinPlan:
    """The schedule of segments in order (RR-9273, Definition 8): checkpoints, the turn, the reversals backwards.

    Args:
        kept: [branches] whether a branch has a segment or an x̄_0 that stays; of others x̄_0 goes after the turn.
        chain: as `chain_steps` makes it.
    """
    steps: list[JoinStep] = []
    for branch, first, length, _, _ in segments:
        steps.append(JoinStep(JoinVerb.S, branch, first))
        steps += (JoinStep(JoinVerb.F, branch, i) for i in range(first, first + length))
    steps.append(JoinStep(JoinVerb.TURN))
    steps += (JoinStep(JoinVerb.D_BAR, branch) for branch, stays in enumerate(kept) if not stays)
    for branch, first, length, slots, opens in reversed(segments):
        steps += reversal(chain, branch, first, first + length - 1, slots)
        if opens:
            steps.append(JoinStep(JoinVerb.D_BAR, branch))
    return JoinPlan(tuple(steps))


def reversal(chain: Array, branch: int, first: int, last: int, slots: int) -> list[JoinStep]:
    """REV: from x_first and x̄_(last+1), the backward steps last … first in so many slots (RR-9273, eq. 3)."""
    steps: list[JoinStep] = []
    todo = [(first, last, slots)]
    while todo:
        low, high, c = todo.pop()
        if low == high:
            steps.append(JoinStep(JoinVerb.B, branch, low))
            continue
        size = high - low
        costs = [i + chain[c - 1, size - i] + chain[c, i - 1] for i in range(1, size + 1)]
        i = 1 + int(np.argmin(costs))
        steps.append(JoinStep(JoinVerb.S, branch, low))
        steps += (JoinStep(JoinVerb.F, branch, at) for at in range(low, low + i))
        todo += ((low, low + i - 1, c), (low + i, high, c - 1))
    return steps
