"""A linear program in HiGHS, the cutting planes that were added to it, and how they are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from ..program import Floats
from .highs_cuts import Cuts

_DROP_EVERY = 3
"""Rounds after which cuts that bind nothing are taken out again."""

OPTIONS: dict[str, str | float] = {
    "presolve": "off",
    "solver": "simplex",
    "simplex_strategy": 1,
    "dual_feasibility_tolerance": 1e-10,
    # steepest edge would weigh all rows anew at each node
    "simplex_dual_edge_weight_strategy": 1,
}
"""What HiGHS is told for programs that are solved again and again with other limits and more rows."""


class CutRows:
    """The rows of the program that a solver has: `number` says which they are, as `Cuts` counts them."""

    def __init__(self, solver: Any, rows: int, cuts: Cuts | None, idle: int = 0) -> None:
        self.solver, self.cuts, self._idle = solver, cuts, idle
        self.number = list(range(rows))
        self._base = rows
        self.rounds = 0

    def tighten(self, x: Floats, over: Callable[[], bool]) -> bool:
        """Add cutting planes that a point breaks; whether there are any."""
        found = [] if self.cuts is None else self.cuts.separate(self.solver, x, self.number, over)
        if not found:
            return False
        self.rounds += 1
        if self.rounds % _DROP_EVERY == 0 and len(self.number) > self._base + self._idle:
            self._drop_idle()
        for cut in found:
            assert self.cuts is not None
            self.number.append(self.cuts.add(cut))
            index = cut.index.astype(np.int32)
            self.solver.addRow(-np.inf, cut.most * cut.scale, len(index), index, cut.value * cut.scale)
        return True

    def _drop_idle(self) -> None:
        """Take cuts out of the program that do not bind at the last point."""
        assert self.cuts is not None
        status = self.solver.getBasis().row_status
        basic = highspy.HighsBasisStatus.kBasic
        idle = [i for i, r in enumerate(self.number) if r >= self.cuts.base and status[i] == basic]
        if idle:
            self.solver.deleteRows(len(idle), np.array(idle, dtype=np.int32))
            gone = set(idle)
            self.number = [r for i, r in enumerate(self.number) if i not in gone]

    def named(self, duals: Floats) -> tuple[NDArray[np.int64], Floats]:
        """The rows whose duals are not 0, by their numbers, and these duals."""
        there = np.flatnonzero(np.abs(duals) > 1e-12)
        return np.array(self.number, dtype=np.int64)[there], duals[there]
