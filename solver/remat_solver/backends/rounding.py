"""A program in whole numbers, for engines that know no others, rounded so that nothing feasible or cheap is lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..program import Floats, Program

EXACT_ACTIVITY = 2.0**31
"""A row of whole numbers whose activity stays below this is passed as it is."""

EXACT_OBJECTIVE = 2.0**40
"""A cost of whole numbers whose sum stays below this is passed as it is."""

_INTEGRAL = 1e-9
_NO_LIMIT = 2**60


@dataclass(frozen=True, eq=False)
class WholeProgram:
    """Minimise cost · x with row_lower ≤ A x ≤ row_upper, all whole numbers; `true` is the program that it relaxes.

    Every feasible whole x of `true` is feasible here, and cost_unit · (cost · x) + cost_base ≤ its true objective.
    So a bound proved here, put through `bound`, holds there. The reverse is not promised: x may break a true row by
    the rounding.
    """

    cost: NDArray[np.int64]
    lower: NDArray[np.int64]
    upper: NDArray[np.int64]
    row_start: NDArray[np.int64]
    row_index: NDArray[np.int64]
    row_value: NDArray[np.int64]
    row_lower: NDArray[np.int64]
    row_upper: NDArray[np.int64]
    cost_unit: float
    cost_base: float

    def bound(self, proved: float) -> float:
        """A bound on the true objective from one on cost · x."""
        return proved * self.cost_unit + self.cost_base


def whole(program: Program, weight_scale: float = 1e7, cost_scale: float = 1e9) -> WholeProgram:
    """Round a program to whole numbers on the safe side: weights and costs down, capacities up.

    Rows and costs that are whole already, and not too large, stay exact. Others are scaled so that the largest number
    of a row is `weight_scale`, and the costs so that all of them together are `cost_scale`. What is rounded is written
    in distances from the variables' lower bounds, which are never negative, so rounding a weight down relaxes.

    Raises:
        ValueError: a variable is continuous or unbounded.
    """
    if not program.integer.all():
        raise ValueError("only programs whose variables are all integer can be rounded to whole numbers")
    if not (np.isfinite(program.lower).all() and np.isfinite(program.upper).all()):
        raise ValueError("only programs whose variables are all bounded can be rounded to whole numbers")
    lower = np.ceil(program.lower - _INTEGRAL)
    upper = np.floor(program.upper + _INTEGRAL)
    cost, unit, base = _whole_cost(program, lower, upper, cost_scale)
    start, index, value, row_lower, row_upper = _whole_rows(program, lower, upper, weight_scale)
    return WholeProgram(
        cost, lower.astype(np.int64), upper.astype(np.int64), start, index, value, row_lower, row_upper, unit, base
    )


def _whole_cost(
    program: Program, lower: Floats, upper: Floats, cost_scale: float
) -> tuple[NDArray[np.int64], float, float]:
    reach = float((np.abs(program.cost) * np.maximum(np.abs(lower), np.abs(upper))).sum())
    if reach <= EXACT_OBJECTIVE and bool((program.cost == np.round(program.cost)).all()):
        return program.cost.astype(np.int64), 1.0, program.offset
    scale = cost_scale / reach
    cost = np.floor(program.cost * scale)
    # cost ≥ floor(cost · scale) / scale holds for x − lower ≥ 0; what the shift leaves over is a constant
    base = float(((program.cost - cost / scale) * lower).sum())
    slack = 2.0**-40 * reach
    return cost.astype(np.int64), 1.0 / scale, base + program.offset - slack


def _whole_rows(
    program: Program, lower: Floats, upper: Floats, weight_scale: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    counts = np.diff(program.row_start).astype(np.int64)
    row_of = np.repeat(np.arange(program.rows), counts)
    index, value = program.row_index.astype(np.int64), program.row_value
    reach = np.bincount(row_of, np.abs(value) * np.maximum(np.abs(lower), np.abs(upper))[index], minlength=program.rows)
    broken = np.bincount(row_of, value != np.round(value), minlength=program.rows) > 0
    exact = ~broken & (reach <= EXACT_ACTIVITY)
    scaled_upper = ~exact & np.isfinite(program.row_upper)
    scaled_lower = ~exact & np.isfinite(program.row_lower)
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats, Floats, Floats]] = []
    # a whole row's activity is whole, so its limits may be drawn in to whole numbers
    low = np.where(np.isfinite(program.row_lower), np.ceil(program.row_lower - _INTEGRAL), -_NO_LIMIT)
    high = np.where(np.isfinite(program.row_upper), np.floor(program.row_upper + _INTEGRAL), _NO_LIMIT)
    chosen = exact[row_of]
    parts.append((counts[exact], index[chosen], value[chosen], low[exact], high[exact]))
    base = np.bincount(row_of, value * lower[index], minlength=program.rows)
    largest = np.zeros(program.rows)
    np.maximum.at(largest, row_of, np.abs(value))
    for which, limit, sign in ((scaled_upper, program.row_upper, 1.0), (scaled_lower, program.row_lower, -1.0)):
        if not which.any():
            continue
        # both sides read: sign · A (x − lower) ≤ room
        room = sign * (limit - base)
        scale = weight_scale / np.maximum(np.maximum(largest, np.abs(np.where(which, room, 0.0))), 1e-300)
        chosen = which[row_of]
        weight = np.floor(sign * value[chosen] * scale[row_of[chosen]])
        # one more than the ceiling covers the float64 rounding of the products themselves
        capacity = np.ceil(room[which] * scale[which]) + 1.0
        shift = np.bincount(row_of[chosen], weight * lower[index[chosen]], minlength=program.rows)[which]
        none = np.full(int(which.sum()), -float(_NO_LIMIT))
        parts.append((counts[which], index[chosen], weight, none, capacity + shift))
    start = np.concatenate(([0], np.cumsum(np.concatenate([part[0] for part in parts]))))
    return (
        start.astype(np.int64),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]).astype(np.int64),
        np.concatenate([part[3] for part in parts]).astype(np.int64),
        np.concatenate([part[4] for part in parts]).astype(np.int64),
    )
