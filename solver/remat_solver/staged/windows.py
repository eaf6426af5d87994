"""The bound by windows of a deep network whose budget is near the least: equal stretches of layers are proved once.

Where next to nothing fits at the loss, relaxations with few coarse stages see the first recomputation of everything
and no second one; those with many mix plans that each exceed the memory somewhere. A stretch of a few layers by itself
is small, and its staged proof sees both. `remat_ir.proof.windows` says what such proofs are worth together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from remat_ir import Graph, Problem, problem_digest
from remat_ir.proof import InvalidProof, StageProof, WindowProof, prove
from remat_ir.proof.windows import Windows

from ..array_view import view_of
from ..blocks.segments import joined, segments_of
from ..deadline import Deadline
from ..incumbent import Incumbent

WindowProver = Callable[[Problem, Deadline], tuple[int, StageProof] | None]
"""Asked what every plan of a window costs at least, each op's first run included, in ns, and for the certificate."""

_FEWEST_SEGMENTS, _MOST_SEGMENTS = 16, 100
"""More are joined, by whole periods."""
_FREE_SHARE = 3
"""There must be so many times as many segments as can have something held at the loss."""
_FIRST_LENGTHS = (1, 2)
"""Segments of the windows that are proved first."""
_OPS, _MORE_OPS, _MOST_OPS = 250, 1.25, 800
"""Ops of a window at first, the factor by which that grows where all smaller ones are proved, and at most."""
_SHARE, _KIND_SHARE, _MOST_S = 0.7, 0.15, 180.0
"""The share of the time that is left, of so many seconds at most, for all windows, and of that for each kind."""
_TOLD_S = 5.0
"""Seconds after which what is proved so far is checked and told."""
_SMALL = 1 / 256
"""Values of up to this share of the largest value are taken as held: statistics of norms, for one."""


Window = tuple[int, int, int]
"""(start, end, spare bytes), as in a certificate."""


class _Kind(NamedTuple):
    """Windows with equal graphs: (start, end, spare bytes) of each."""

    graph: Graph
    windows: tuple[Window, ...]


def prove_by_windows(incumbent: Incumbent, prover: WindowProver) -> None:
    """Raise the bound by windows, where segments repeat and few of them have room for a value at the loss.

    After short windows those are proved that lie between the values whose holding costs least by what is known.
    """
    made = _Windowed.of(incumbent) if incumbent.certifies else None
    if made is None:
        return
    watch = incumbent.deadline.within(_SHARE * min(incumbent.deadline.remaining(), _MOST_S))
    told = watch.within(_TOLD_S)
    while not (watch.passed() or incumbent.stopped()):
        kind = made.next_kind()
        if kind is None:
            break
        found = prover(Problem(kind.graph, made.on.capacity), watch.within(_KIND_SHARE * watch.remaining()))
        made.take(kind, found)
        if told.passed():
            made.tell(incumbent)
            told = watch.within(_TOLD_S)
    made.tell(incumbent)


class _Windowed:
    """The windows of a graph, and what of them is proved so far."""

    def __init__(self, problem: Problem, on: Windows, turn: int, small_bytes: int) -> None:
        self.on, self._problem = on, problem
        self._proof = WindowProof(
            problem_digest(problem), turn, tuple(on.firsts), tuple(on.laters), small_bytes, (), ()
        )
        self._costs: list[tuple[int, int, int, int]] = []
        self._done: set[Window] = set()
        self._most_ops: float = _OPS
        self._repeated = (0, 0)
        self._first = self._first_kinds()

    @classmethod
    def of(cls, incumbent: Incumbent) -> _Windowed | None:
        """Segments around the op of the greatest need behind the forward pass; None where windows are not worth it."""
        problem = incumbent.problem
        graph, view = problem.graph, view_of(problem)
        segments = segments_of(graph)
        if segments is None or segments.count < _FEWEST_SEGMENTS or graph.link is not None:
            return None
        segments, _ = joined(segments, _MOST_SEGMENTS, incumbent.stopped)
        split = segments.ends[-1] + 1
        turn = split - 1 + int(np.argmax(view.need[split - 1 : segments.backward_starts[-2]]))
        if turn >= graph.ops - 1:
            return None
        firsts = [*(segments.forward(i).start for i in range(segments.count)), min(split, turn)]
        laters = [max(start, turn + 1) for start in (graph.ops, *segments.backward_starts)]
        small = int(_SMALL * max(graph.value_bytes))
        try:
            on = Windows(graph, view.capacity, turn, firsts, laters, small)
        except InvalidProof:
            return None
        held = on.most_touched()
        if held is None or _FREE_SHARE * held > segments.count:
            return None
        return cls(problem, on, turn, small)

    def _first_kinds(self) -> list[_Kind]:
        """Short windows, to be taken from the end: the frequent ones first; single segments also with values held."""
        on, ranked = self.on, []
        for length in _FIRST_LENGTHS:
            found: dict[Graph, list[Window]] = {}
            for start in range(on.segments - length + 1):
                for spare in (0, *on.spares(start)) if length == 1 else (0,):
                    window = (start, start + length, spare)
                    found.setdefault(on.window(*window), []).append(window)
            if length == 1:
                again = [start for windows in found.values() for start, *_ in windows if len(windows) > 1]
                self._repeated = (min(again, default=0), max(again, default=-1) + 1)
            ranked += sorted(found.items(), key=lambda item: -len(item[1]))
        return [_Kind(graph, tuple(windows)) for graph, windows in reversed(ranked)]

    def next_kind(self) -> _Kind | None:
        """Windows that are not proved yet and may raise the bound; None where there are none of up to `_MOST_OPS`."""
        if self._first:
            return self._first.pop()
        touched = self.on.least(self._costs).touched
        gaps = list(pairwise((-1, *touched, self.on.segments)))
        while self._most_ops <= _MOST_OPS:
            for before, after in sorted(gaps, key=lambda gap: gap[0] - gap[1]):
                # what repeats is proved once; the rest, at both ends, segment by segment
                window = self._longest(max(before + 1, self._repeated[0]), min(after, self._repeated[1]))
                if window is not None and window not in self._done:
                    return self._kind(window)
            self._most_ops *= _MORE_OPS
        return None

    def _longest(self, start: int, end: int) -> Window | None:
        """The window of the segments from `start` on that has no more ops than are allowed."""
        on, most = self.on, start
        for stop in range(start + 1, end + 1):
            ops = on.firsts[stop] - on.firsts[start] + on.laters[start] - on.laters[stop]
            if ops <= self._most_ops:
                most = stop
        return None if most == start else (start, most, 0)

    def _kind(self, window: Window) -> _Kind:
        """All windows with the graph of one."""
        on, (start, end, spare) = self.on, window
        ops = on.firsts[end] - on.firsts[start]
        graph = on.window(*window)
        found = [
            (a, a + end - start, spare)
            for a in range(on.segments - (end - start) + 1)
            if on.firsts[a + end - start] - on.firsts[a] == ops
            and (a == start or on.window(a, a + end - start, spare) == graph)
        ]
        return _Kind(graph, tuple(found))

    def take(self, kind: _Kind, found: tuple[int, StageProof] | None) -> None:
        """Note what is proved of a kind of windows, if anything."""
        proof, number = self._proof, len(self._proof.parts)
        self._done |= set(kind.windows)
        extra = 0 if found is None else found[0] - kind.graph.total_cost_ns
        if found is None or extra <= 0:
            return
        self._costs += [(*window, extra) for window in kind.windows]
        self._proof = replace(
            proof,
            parts=(*proof.parts, replace(found[1], digest=proof.digest)),
            windows=(*proof.windows, *((*window, number) for window in kind.windows)),
        )

    def tell(self, incumbent: Incumbent) -> None:
        """Raise the bound to what all parts prove together, checked."""
        if not self._proof.parts:
            return
        try:
            bound_ns = prove(self._problem, self._proof).bound_ns
        except InvalidProof:
            return
        if bound_ns is not None:
            incumbent.raise_bound(bound_ns, "windows", proof=self._proof)
