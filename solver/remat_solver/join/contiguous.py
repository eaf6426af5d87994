"""Join networks beyond the exact program's reach: one branch after another, and a bound from the total length alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from remat_ir import JoinPlan

from .._numba import kernel
from ..deadline import look, never
from .table import NEVER, Segment, canonical_plan, chain_steps

Array = Any

MOST_WORK = 4e9
"""Additions that one of the programs here may take: some seconds."""

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


class Contiguous:
    """The best canonical schedules in which a branch has all its checkpoints before the next one begins.

    A restriction of Theorem 3 (RR-9273) whose table is quadratic in one branch instead of a product over all: of 300
    random joins of two and three branches of up to 12 steps it missed the optimum 5 times, by up to 6 %.

    Args:
        lengths, stays: of the join: ℓ and b.
        slots: c.

    Raises:
        TimeUp: `stop`, which is asked all the time, said so; `plan` raises it, too.
    """

    def __init__(
        self, lengths: tuple[int, ...], slots: int, stays: Sequence[bool], stop: Callable[[], bool] = never
    ) -> None:
        self.lengths, self.stays = lengths, tuple(stays)
        self.slots = min(slots, sum(lengths) + len(lengths) + 1)
        self._chain, self._stop = chain_steps(max(lengths), self.slots + 1, stop), stop

    @staticmethod
    def work(lengths: tuple[int, ...], slots: int) -> float:
        """How many additions the program takes."""
        c = min(slots, sum(lengths) + len(lengths) + 1)
        orders = len(list(_orders(lengths, (False,) * len(lengths))))
        return float(orders * sum(c * length**2 / 2 for length in lengths) + c * max(lengths) ** 2 / 2)

    def plan(self) -> JoinPlan | None:
        """The cheapest over the orders of the branches that are tried, or None where none fits."""
        found: tuple[int, list[Segment]] | None = None
        for order in _orders(self.lengths, self.stays):
            cost, segments = self._in_order(order)
            if cost < NEVER and (found is None or cost < found[0]):
                found = (cost, segments)
        if found is None:
            return None
        kept = [stays or length > 0 for stays, length in zip(self.stays, self.lengths, strict=True)]
        return canonical_plan(found[1], kept, self._chain)

    def _in_order(self, order: Sequence[int]) -> tuple[int, list[Segment]]:
        most = self.slots - len(self.lengths)
        if most < 0:
            return NEVER, []
        begin = np.full(most + 1, NEVER, np.int64)
        begin[0], kept, tables = 0, sum(self.stays), []
        for branch in order:
            length, others = self.lengths[branch], kept - self.stays[branch]
            table, cut = np.full((most + 1, length + 1), NEVER, np.int64), np.zeros((most + 1, length + 1), np.int64)
            table[:, length] = begin
            # a segment needs two slots that are free
            for t in range(min(most, self.slots - others - 1)):
                look(self._stop)
                _fill_branch(table, cut, self._chain, t, self.slots - t - others, length)
            tables.append((branch, others, cut))
            begin, kept = table[:, 0].copy(), others + 1
        t = int(np.argmin(begin))
        cost, segments = int(begin[t]), []
        for branch, others, cut in reversed(tables) if cost < NEVER else ():
            left, opens = 0, not self.stays[branch]
            while left < self.lengths[branch]:
                i = int(cut[t, left])
                left, t = left + i, t - 1
                first = self.lengths[branch] - left
                segments.append(Segment(branch, first, i, self.slots - t - others, opens and first == 0))
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
