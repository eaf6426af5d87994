"""What a proof tells apart, and what it tells apart next: stages, recomputations, what rounding let through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..array_view import ArrayView
from ..program import Floats
from ..trace import Trace
from .relaxation import Columns
from .reruns import add_to, violated_reruns
from .rows import Round, Rows, cover_of
from .scale import Scale, finer, scale_of

_LONG_STAGE, _CLOSE = 20, 0.1
"""What is called close to the begin of a coarse stage of so many ops and more, as a share of its length."""


@dataclass(frozen=True)
class ProofOptions:
    """What a proof may use; each changes its pace, none its result.

    linear: begin with linear programs. reruns: rows (h). loose: leave a gap in integer programs whose solution breaks
    the memory anyway. nested: keep the rows of coarse stages that were cut.
    """

    linear: bool = True
    reruns: bool = True
    loose: bool = True
    nested: bool = True


class Refinement:
    """The rows that a proof has found, the units that it counts in, and how both are refined.

    It begins with one coarse stage besides stage 0.
    """

    def __init__(self, view: ArrayView, options: ProofOptions) -> None:
        self.view, self.options = view, options
        self.scale: Scale = scale_of(view)
        last = view.ops - 1
        self.rows = Rows({min(max(0, view.roomy - 1), last), last})

    def refine(self, round_: Round, x: Floats, run: Trace) -> bool:
        """Tell apart the stage in which the sequence breaks memory most; False where all that can be is told apart."""
        new = self.options.reruns and add_to(self.rows.reruns, violated_reruns(self.view, round_.columns, x))
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
