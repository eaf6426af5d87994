"""Cutting planes until no point is left that costs less than what is to be proved.

Where much is alike, as in a network of equal layers, many points cost the same, and neither a branch nor a cutting
plane of one of them raises the least cost. With the cost as a row in place of the objective,

    c x ≤ what is to be proved, less 1

points far from the least cost are cut off too, by rows that are rounded from this one among others. Once there is no
point left, that is proved, by one vector of multipliers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from ..program import Floats
from .highs_cuts import Cuts
from .highs_rows import OPTIONS, CutRows

_WITHOUT = 14
"""Rounds without an objective; then the costs are it, times weights that are drawn anew for each round."""
_MOST_WEIGHT = 2.0
_FRUITLESS = 5
"""Points in a row that no cutting plane is found for, after which it ends."""
_IDLE = 100
"""So many cutting planes may be in the program before those that do not bind are taken out again."""
_STATUS = highspy.HighsModelStatus


class CutoffProof:
    """The program without an objective, of a solver whose row `row` is to hold with the right side `most`."""

    def __init__(self, solver: Any, cuts: Cuts, row: int, most: float) -> None:
        program = solver.getLp()
        self._cost = np.array(program.col_cost_)
        program.col_cost_ = np.zeros(program.num_col_)
        upper = np.array(program.row_upper_)
        upper[row] = most
        program.row_upper_ = upper
        self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.setOptionValue("output_flag", False)
        for name, value in (*OPTIONS.items(), ("threads", 1)):
            self._solver.setOptionValue(name, value)
        self._solver.passModel(program)
        self._rows = CutRows(self._solver, program.num_row_, cuts, _IDLE)
        self._point: Floats | None = None
        self._random = np.random.default_rng(0)
        self._rounds = self._fruitless = 0
        self.seconds = 0.0
        """CPU seconds so far."""
        self.ended = False
        """Whether nothing more can be done: no cutting plane is found, or HiGHS fails."""

    def go_on(
        self, seconds: float, deadline: float, over: Callable[[], bool]
    ) -> tuple[NDArray[np.int64], Floats] | None:
        """Rounds of cutting planes for so many CPU seconds, and one at least; rows and duals once no point is left."""
        limit = self._solver.getRunTime() + max(0.01, deadline - time.monotonic())
        self._solver.setOptionValue("time_limit", limit)
        until = time.process_time() + seconds
        while not self.ended and not over():
            began = time.process_time()
            found = self._round(over)
            self.seconds += time.process_time() - began
            if found is not None or time.process_time() > until:
                return found
        return None

    def _round(self, over: Callable[[], bool]) -> tuple[NDArray[np.int64], Floats] | None:
        if self._point is not None and self._rows.tighten(self._point, over):
            self._fruitless = 0
        elif self._point is not None:
            self._fruitless += 1
            self.ended = self._fruitless > _FRUITLESS
        if self._rounds >= _WITHOUT or self._fruitless:
            weight = self._random.uniform(0.0, _MOST_WEIGHT, len(self._cost))
            self._solver.changeColsCost(len(weight), np.arange(len(weight), dtype=np.int32), weight * self._cost)
        self._rounds += 1
        self._solver.run()
        if self._solver.getModelStatus() == _STATUS.kInfeasible:
            self.ended = True
            _, has, ray = self._solver.getDualRay()
            return self._rows.named(np.array(ray)) if has else None
        self.ended = self.ended or self._solver.getModelStatus() != _STATUS.kOptimal
        self._point = np.array(self._solver.getSolution().col_value)
        return None
