"""Runs of equal blocks in the order of the segments, and segments joined so that what repeats stays whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from ..deadline import look, never
from .block import Block, block_of
from .segments import Segments, with_ends

_LONGEST_PERIOD = 64


class Run(NamedTuple):
    """Segments start … start + period · times − 1, in which every block equals the one `period` before it."""

    start: int
    period: int
    times: int


def runs_of(kinds: Sequence[Hashable], stop: Callable[[], bool] = never) -> list[Run]:
    """The repeated stretches of a sequence, from left to right, each as far as it goes with its shortest period.

    Stretches do not overlap; of those that begin at one place the longest is taken. O(length · longest period).
    Where `stop` says so, `TimeUp` is raised.
    """
    count = len(kinds)
    # reach[p][i]: how many entries from i on equal the entry p later
    most = min(_LONGEST_PERIOD, count // 2)
    reach = [[0] * (count + 1) for _ in range(most + 1)]
    for period in range(1, most + 1):
        look(stop)
        row = reach[period]
        for i in range(count - period - 1, -1, -1):
            row[i] = row[i + 1] + 1 if kinds[i] == kinds[i + period] else 0
    found: list[Run] = []
    i = 0
    while i < count:
        best = Run(i, 1, 1)
        for period in range(1, most + 1):
            times = 1 + reach[period][i] // period
            if times > 1 and period * times > best.period * best.times:
                best = Run(i, period, times)
        if best.times > 1:
            found.append(best)
        i += best.period * best.times
    return found


def joined(segments: Segments, most: int, stop: Callable[[], bool] = never) -> tuple[Segments, list[Block]]:
    """At most about `most` segments, made by joining neighbours, and their blocks; inside runs, by whole periods.

    So repeats stay repeats: a run of 330 pairs of equal segments becomes 165 pairs of pairs, of one kind.
    Where `stop` says so, `TimeUp` is raised.
    """
    blocks = _blocks(segments, stop)
    while segments.count > most:
        runs = {run.start: run for run in runs_of(blocks, stop)}
        ends: list[int] = []
        i = 0
        while i < segments.count:
            run = runs.get(i)
            if run is None:
                width, beyond = (1 if i + 1 in runs else 2), i + 1
            else:
                # one period at a time first, then two of them
                width = run.period if run.period > 1 else 2
                beyond = i + run.period * run.times
            while i < beyond:
                i = min(i + width, segments.count) if run is None else min(i + width, beyond)
                ends.append(segments.ends[i - 1])
        if len(ends) == segments.count:
            break
        segments = with_ends(segments.graph, tuple(ends))
        blocks = _blocks(segments, stop)
    return segments, blocks


def _blocks(segments: Segments, stop: Callable[[], bool]) -> list[Block]:
    blocks: list[Block] = []
    for i in range(segments.count):
        look(stop)
        blocks.append(block_of(segments, i))
    return blocks
