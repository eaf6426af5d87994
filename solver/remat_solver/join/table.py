"""Schedules of a join network, counted in forward steps: all else runs exactly once.

The optimum (RR-9273, Theorem 3); and beyond the reach of its program one branch after another, and a bound from the
total length alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
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
        radix = max(self.lengths) + 1
        order = sorted(range(len(lengths)), key=lambda j: kept[j])
        return int(self._table[c, sum(kept), sum(lengths[j] * radix**i for i, j in enumerate(order))])


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


MOST_ADDITIONS = 4e9
"""Additions that one of the programs below may take: some seconds."""

_MOST_ORDERS = 24


@kernel(nogil=True)
def _fill_branch(table: Array, cut: Array, chain: Array, t: int, free: int, length: int) -> None:
    """From [t checkpoints, steps left] to one more: each segment is one."""
    for left in range(length, 0, -1):
        if table[t, left] >= NEVER:
            continue
        for i in range(1, left + 1):
            cost = table[t, left] + i + chain[free, i - 1]
            if cost < table[t + 1, left - i]:
                table[t + 1, left - i] = cost
                cut[t + 1, left - i] = i


def contiguous_plan(
    lengths: tuple[int, ...], slots: int, stays: Sequence[bool], stop: Callable[[], bool] = never
) -> JoinPlan | None:
    """The best canonical schedule in which a branch has all its checkpoints before the next one begins, or None.

    A restriction of Theorem 3 (RR-9273) whose table is quadratic in one branch instead of a product over all: of 300
    random joins of two and three branches of up to 12 steps it missed the optimum 5 times, by up to 6 %. The orders of
    the branches are those of `_orders`. Where `stop` says so, `TimeUp` is raised.
    """
    c = min(slots, sum(lengths) + len(lengths) + 1)
    chain = chain_steps(max(lengths), c + 1, stop)
    least: int = NEVER
    best: list[Segment] = []
    for order in _orders(lengths, stays):
        cost, segments = _in_order(order, lengths, c, stays, chain, stop)
        if cost < least:
            least, best = cost, segments
    if least >= NEVER:
        return None
    kept = [stay or length > 0 for stay, length in zip(stays, lengths, strict=True)]
    return canonical_plan(best, kept, chain)


def contiguous_work(lengths: tuple[int, ...], slots: int) -> float:
    """How many additions `contiguous_plan` takes."""
    c = min(slots, sum(lengths) + len(lengths) + 1)
    orders = len(list(_orders(lengths, (False,) * len(lengths))))
    return float(orders * sum(c * length**2 / 2 for length in lengths) + c * max(lengths) ** 2 / 2)


def _in_order(
    order: Sequence[int],
    lengths: tuple[int, ...],
    slots: int,
    stays: Sequence[bool],
    chain: Array,
    stop: Callable[[], bool],
) -> tuple[int, list[Segment]]:
    most = slots - len(lengths)
    if most < 0:
        return NEVER, []
    begin = np.full(most + 1, NEVER, np.int64)
    begin[0], kept, tables = 0, sum(stays), []
    for branch in order:
        length, others = lengths[branch], kept - stays[branch]
        table, cut = np.full((most + 1, length + 1), NEVER, np.int64), np.zeros((most + 1, length + 1), np.int64)
        table[:, length] = begin
        # a segment needs two slots that are free
        for t in range(min(most, slots - others - 1)):
            look(stop)
            _fill_branch(table, cut, chain, t, slots - t - others, length)
        tables.append((branch, others, cut))
        begin, kept = table[:, 0].copy(), others + 1
    t = int(np.argmin(begin))
    cost, segments = int(begin[t]), []
    for branch, others, cut in reversed(tables) if cost < NEVER else ():
        left, opens = 0, not stays[branch]
        while left < lengths[branch]:
            i = int(cut[t, left])
            left, t = left + i, t - 1
            first = lengths[branch] - left
            segments.append(Segment(branch, first, i, slots - t - others, opens and first == 0))
    return cost, segments[::-1]


def _orders(lengths: tuple[int, ...], stays: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Orders of the branches that have steps, different ones in length or b: all of a few, else by length."""
    there = [j for j, length in enumerate(lengths) if length]

    def alike(j: int) -> tuple[int, bool]:
        return lengths[j], bool(stays[j])

    def orders(left: list[int]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for first in {alike(j): j for j in reversed(left)}.values():
            for rest in orders([j for j in left if j != first]):
                yield (first, *rest)

    few = list(islice(orders(there), _MOST_ORDERS + 1))
    if len(few) <= _MOST_ORDERS:
        yield from few
    else:
        yield tuple(sorted(there, key=alike))
        yield tuple(sorted(there, key=alike, reverse=True))


@kernel(nogil=True)
def _fill_relaxed(
    table: Array, chain: Array, t: int, kept: int, slots: int, branches: int, most_kept: int, longest: int
) -> None:
    """[t checkpoints, kept, steps left] the least cost to go; what has a checkpoint more must be there."""
    for left in range(table.shape[2]):
        best = NEVER
        if left == 0:
            best = 0 if slots - t >= branches and kept == most_kept else NEVER
        elif t + 1 < table.shape[0]:
            for fresh in range(2):
                if (fresh and kept == most_kept) or (not fresh and kept == 0):
                    continue
                free = slots - t - kept + 1 - fresh
                if free < 2:
                    continue
                for i in range(1, min(longest, left) + 1):
                    rest = table[t + 1, kept + fresh, left - i]
                    if rest < NEVER:
                        best = min(best, rest + i + chain[free, i - 1])
        table[t, kept, left] = best


def relaxed_steps(
    lengths: tuple[int, ...], slots: int, stays: Sequence[bool], stop: Callable[[], bool] = never
) -> int | None:
    """A lower bound on the forward steps of every schedule, or None where there is none in so many slots.

    Theorem 3's recursion (RR-9273) with the lengths of the branches forgotten but for their sum, their largest and how
    many are not 0: every schedule's segments are a solution of it, of the same cost. Where `stop` says so, `TimeUp` is
    raised.
    """
    count, longest = sum(lengths), max(lengths)
    c = min(slots, count + len(lengths) + 1)
    if c < len(lengths):
        return None
    most_kept = sum(stay or length > 0 for stay, length in zip(stays, lengths, strict=True))
    table = np.full((min(count, c) + 1, most_kept + 1, count + 1), NEVER, np.int64)
    chain = chain_steps(longest, c + 1, stop)
    for t in range(table.shape[0] - 1, -1, -1):
        for kept in range(most_kept + 1):
            look(stop)
            _fill_relaxed(table, chain, t, kept, c, len(lengths), most_kept, longest)
    found = int(table[0, sum(stays), count])
    return None if found >= NEVER else found


def relaxed_work(lengths: tuple[int, ...], slots: int) -> float:
    """How many additions the bound takes."""
    count = sum(lengths)
    c = min(slots, count + len(lengths) + 1)
    return float(2 * min(count, c) * (len(lengths) + 1) * count * max(lengths) + c * max(lengths) ** 2 / 2)
