"""How far the memory is broken inside coarse stages, where the relaxation does not look: where to cut next.

Let t be an op first computed in coarse stage c before its end τ_c. A value v is certainly resident while t runs if its
maker p(v) does not run (again) in c and either v is read by a first computation in t + 1 … τ_c, or v is resident when c
ends: then v has been resident without a break since before t. So with S' = S_{c+1,v} and R = R_{c,p(v)}

    x_v = 1 − R   if v is read by a first computation in t + 1 … τ_c,      else   S' − R

is at most the indicator of that, and need(t) + Σ M_v max(0, x_v) over the values made before t that t does not read
says how much memory t must have. (Ops first computed in c itself are taken not to run twice in c, which makes this an
estimate for them.) The same inequality can be written as a row instead of a cut at t: tried, it raised bounds less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Floats
from .relaxation import ONE, ZERO, Columns


class Violation(NamedTuple):
    """By which fraction of the capacity the memory is exceeded while an op is first computed."""

    fraction: float
    op: int


def violations(view: ArrayView, columns: Columns, x: Floats, *, tolerance: float = 1e-3) -> list[Violation]:
    """The slots of first computations inside coarse stages that a solution, fractional or not, cannot afford."""
    found: list[Violation] = []
    for c in range(1, columns.stages):
        run = values_of(columns.runs[c], x)[view.maker]
        hold_next = values_of(held_at_end(view, columns, c), x)
        due = np.zeros(view.values, dtype=np.bool_)
        for op in range(columns.cuts[c] - 1, columns.first[c] - 1, -1):
            due[view.inputs(op + 1)] = True
            resident = np.where(due, 1.0, hold_next) - run
            resident[view.value_start[op] :] = 0.0
            resident[view.inputs(op)] = 0.0
            np.maximum(resident, 0.0, out=resident)
            excess = (float(resident @ view.size) + float(view.need[op]) - view.capacity) / max(view.capacity, 1)
            if excess > tolerance:
                found.append(Violation(excess, op))
    return found


def held_at_end(view: ArrayView, columns: Columns, c: int) -> Ids:
    """[m] the column of S_{c+1,v}; after the last coarse stage only kept values matter."""
    if c + 1 < columns.stages:
        return columns.holds[c + 1]
    return np.where(view.kept, ONE, ZERO)


def values_of(column: Ids, x: Floats) -> Floats:
    """What a table of columns holds at a solution."""
    return np.where(column >= 0, x[np.maximum(column, 0)] if len(x) else 0.0, np.where(column == ONE, 1.0, 0.0))
