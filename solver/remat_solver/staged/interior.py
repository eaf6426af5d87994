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
    made = view.maker + 1
    for c in range(1, columns.stages):
        first, end = int(columns.first[c]), int(columns.cuts[c])
        run = values_of(columns.runs[c], x)[view.maker]
        due = np.maximum(1.0 - run, 0.0) * view.size
        held = np.maximum(values_of(held_at_end(view, columns, c), x) - run, 0.0) * view.size
        last = np.full(view.values, -1)
        earlier = view.uses.op <= end
        np.maximum.at(last, view.uses.value[earlier], view.uses.op[earlier])
        # from the op after its maker on, a value is there: as one that is due before its last use, then as one held
        change = np.zeros(max(view.ops, end) + 2)
        np.add.at(change, made, due)
        np.add.at(change, np.maximum(last, made), held - due)
        read = (view.uses.op >= first) & (view.uses.op < end)
        op, value = view.uses.op[read], view.uses.value[read]
        inputs = np.bincount(op, np.where(op < last[value], due[value], held[value]), minlength=end)
        memory = np.cumsum(change)[first:end] - inputs[first:end] + view.need[first:end]
        excess = (memory - view.capacity) / max(view.capacity, 1)
        found += [Violation(float(excess[i]), first + int(i)) for i in np.flatnonzero(excess > tolerance)]
    return found


def held_at_end(view: ArrayView, columns: Columns, c: int) -> Ids:
    """[m] the column of S_{c+1,v}; after the last coarse stage only kept values matter."""
    if c + 1 < columns.stages:
        return columns.holds[c + 1]
    return np.where(view.kept, ONE, ZERO)


def values_of(column: Ids, x: Floats) -> Floats:
    """What a table of columns holds at a solution."""
    return np.where(column >= 0, x[np.maximum(column, 0)] if len(x) else 0.0, np.where(column == ONE, 1.0, 0.0))
