"""What a proof tells apart, and what it tells apart next: stages, recomputations, what rounding let through.

Where no point breaks the memory, it is the cut that raises the linear bound most, found with few linear programs.
What a cut gains changes little from one op to the next, and mostly falls as others are added. So a grid of ops is tried
once and what lies around its best ones; after that the greatest known gains come first and are renewed until the
greatest is a new one (lazy greedy selection: Minoux, 1978).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from ..array_view import ArrayView, Trace
from ..program import Floats
from .relaxation import Columns
from .rows import Round, Rows, add_to, cover_of, violated_recomputations
from .scale import Scale, finer, scale_of

_GRID = 32
"""How many ops are tried at first, evenly spread."""
_AROUND = 3
"""Around how many of the best ones it looks closer."""
_RENEWED = 24
"""How many known gains are renewed at most before the best of these is taken."""


class Gain(NamedTuple):
    """By how much a cut at an op raises the bound."""

    raised: float
    op: int


class Gains:
    """What cuts at the ops from `first` to `last` would gain, as far as it was tried."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._step = max(1, (last - first) // _GRID)
        self._known: dict[int, float] = {}

    def best(self, cuts: Collection[int], raised: Callable[[int], float], over: Callable[[], bool]) -> Gain | None:
        """The greatest gain, besides the present cuts; None where nothing could be tried before `over` said stop.

        `raised` solves a linear program with one more cut.

        >>> hill = lambda op: -abs(op - 37)
        >>> Gains(0, 100).best([50], hill, lambda: False)
        Gain(raised=0, op=37)
        """
        fresh: dict[int, float] = {}

        def try_(op: int) -> None:
            if self.first <= op <= self.last and op not in cuts and op not in fresh and not over():
                fresh[op] = self._known[op] = raised(op)

        if not self._known:
            for op in range(self.first + self._step // 2, self.last + 1, self._step):
                try_(op)
            for cut in sorted(cuts):
                try_(cut - 1)
                try_(cut + 1)
        else:
            # the greatest known gains are renewed until the greatest is one of those
            while len(fresh) < _RENEWED and not over():
                left = {op: gain for op, gain in self._known.items() if op not in cuts}
                greatest = max(left, key=lambda op: left[op], default=None)
                if greatest is None or greatest in fresh:
                    break
                try_(greatest)
        for op in sorted(fresh, key=lambda op: -fresh[op])[:_AROUND]:
            self._closer(op, fresh, try_)
        return max((Gain(gain, op) for op, gain in fresh.items()), default=None)

    def _closer(self, op: int, fresh: dict[int, float], try_: Callable[[int], None]) -> None:
        """Try what lies on both sides of an op, ever closer to the best."""
        away = self._step // 2
        while away:
            near = (op - away, op, op + away)
            for each in near:
                try_(each)
            op = max((each for each in near if each in fresh), key=lambda each: fresh[each])
            away //= 2


_LONG_STAGE, _CLOSE = 20, 0.1
"""What is called close to the begin of a coarse stage of so many ops and more, as a share of its length."""


class Refinement:
    """The rows that a proof has found, the units that it counts in, and how both are refined.

    It begins with one coarse stage besides stage 0.
    """

    def __init__(self, view: ArrayView) -> None:
        self.view = view
        self.scale: Scale = scale_of(view)
        last = view.ops - 1
        self.rows = Rows({min(max(0, view.tight_from - 1), last), last})

    def refine(self, round_: Round, x: Floats, run: Trace) -> bool:
        """Tell apart the stage in which the sequence breaks memory most; False where all that can be is told apart."""
        new = add_to(self.rows.recomputations, violated_recomputations(self.view, round_.columns, x))
        rounded: list[int] = []
        for position in np.argsort(-run.memory, kind="stable").tolist():
            if run.memory[position] <= self.view.capacity:
                break
            stage, op = int(run.stage[position]), int(run.order[position])
            cut = cut_for(self.view, round_.columns, stage, op, run)
            if cut is not None:
                self.rows.cut(cut)
                return True
            if op == stage:
                rounded.append(stage)
        return new or self._unround(round_, x, rounded)

    def _unround(self, round_: Round, x: Floats, ops: list[int]) -> bool:
        """Tighten what rounding let through at first computations that are cuts; whether there was such a thing."""
        if not ops:
            return False
        scale = finer(self.scale, self.view)
        if scale is not None:
            self.scale = scale
            return True
        covers = [cover_of(self.view, round_.columns, op, x) for op in ops[:4]]
        found = [cover for cover in covers if cover is not None]
        self.rows.covers += found
        return bool(found)


def cut_for(view: ArrayView, columns: Columns, stage: int, op: int, run: Trace) -> int | None:
    """Where to cut the coarse stage in which a computation breaks memory; None where it is all told apart.

    There, but not close to where the coarse stage begins or ends: the next solution would break memory a step
    further on, and so round after round.
    """
    c = columns.stage_of(stage)
    first, last = columns.first[c], columns.cuts[c]
    if stage == last:
        return None if op == stage or first == last else (first + last) // 2
    if last - first >= _LONG_STAGE and stage - first <= _CLOSE * (last - first):
        broken = run.stage[(run.memory > view.capacity) & (run.stage >= first) & (run.stage < last)]
        stages = np.unique(broken)
        return int(stages[len(stages) // 2])
    return stage
