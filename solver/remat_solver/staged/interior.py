"""Memory while ops inside a coarse stage are first computed: rows (g), separated where a solution breaks them.

Let t be an op first computed in coarse stage c before its end τ_c. A value v is certainly resident while t runs if its
maker p(v) does not run (again) in c and either v is read by a first computation in t + 1 … τ_c, or v is resident when c
ends: then v has been resident without a break since before t. With S' = S_{c+1,v} and R = R_{c,p(v)}, or, where p(v) is
first computed in c itself, Q_{p(v)} = 1 if p(v) runs more than once in c,

    x_v = 1 − R   if v is read by a first computation in t + 1 … τ_c,      else   S' − R

is at most the indicator of that, so for every set V of values made before t that t does not read

    (g)  need(t) + Σ_{v ∈ V} M_v x_v ≤ capacity.

This holds for any number of recomputations in any order. Q_i costs C_i like R, since the second computation is one
more than each op's first. Each op is first computed in one coarse stage, so there are fewer than n of the Q in all. V
is chosen as the values with x_v > 0 at the solution to be cut off. A row is remembered as (t, V): after a refinement it
is written anew for the coarse stage in which t then lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..program import Builder, Floats, Term
from .relaxation import ONE, ZERO, Columns
from .scale import Scale
from .shape import Flags, Ids, Shape


@dataclass(frozen=True, eq=False)
class Slot:
    """A row (g): the op that is first computed, and the values counted as resident meanwhile."""

    op: int
    values: Ids


def again_columns(shape: Shape, columns: Columns, builder: Builder, scale: Scale) -> Ids:
    """[n] the columns of the Q; ZERO where an op cannot run twice in its own coarse stage to any use."""
    ops = np.arange(shape.ops)
    stage = np.searchsorted(np.array(columns.cuts), ops)
    last = np.array(columns.cuts)[stage]
    useful = (stage > 0) & (ops < last) & (shape.op_reach > ops) & ~shape.pinned
    again = np.full(shape.ops, ZERO)
    again[useful] = builder.variables(int(useful.sum()), cost=scale.costs(shape.cost)[useful])
    return again


def add_slots(
    shape: Shape, columns: Columns, again: Ids, slots: Iterable[Slot], builder: Builder, scale: Scale
) -> None:
    """Write rows (g); those whose op has become a cut are covered by (d) and left out."""
    for slot in slots:
        c = columns.stage_of(slot.op)
        if c == 0 or columns.cuts[c] == slot.op:
            continue
        due = _due(shape, slot.op + 1, columns.cuts[c])
        hold_next = held_at_end(shape, columns, c)
        run = _runs(shape, columns, c, again)[shape.maker[slot.values]]
        read = due[slot.values]
        hold = np.where(read, ONE, hold_next[slot.values])
        inside = hold != ZERO
        run, hold, size = run[inside], hold[inside], shape.size[slot.values][inside]
        room = shape.capacity - int(shape.need[slot.op]) - int(size[hold == ONE].sum())
        terms = [
            Term(0, hold[hold >= 0], scale.weights(size[hold >= 0])),
            Term(0, run[run >= 0], scale.weights(-size[run >= 0])),
        ]
        builder.add_rows(1, terms, upper=scale.room(room))


def violated(
    shape: Shape, columns: Columns, again: Ids, x: Floats, *, tolerance: float = 1e-3
) -> list[tuple[float, Slot]]:
    """Rows (g) that a solution breaks by more than a fraction of the capacity, with that fraction, worst of all ops."""
    found: list[tuple[float, Slot]] = []
    for c in range(1, columns.stages):
        run = values_of(_runs(shape, columns, c, again), x)[shape.maker]
        hold_next = values_of(held_at_end(shape, columns, c), x)
        due = np.zeros(shape.values, dtype=np.bool_)
        for op in range(columns.cuts[c] - 1, columns.first[c] - 1, -1):
            due[shape.inputs(op + 1)] = True
            resident = np.where(due, 1.0, hold_next) - run
            resident[shape.value_start[op] :] = 0.0
            resident[shape.inputs(op)] = 0.0
            np.maximum(resident, 0.0, out=resident)
            excess = (float(resident @ shape.size) + float(shape.need[op]) - shape.capacity) / max(shape.capacity, 1)
            if excess > tolerance:
                found.append((excess, Slot(op, np.flatnonzero(resident > 1e-9))))
    return found


def _due(shape: Shape, start: int, end: int) -> Flags:
    """[m] whether the first computation of an op from `start` to `end` reads the value."""
    due = np.zeros(shape.values, dtype=np.bool_)
    due[shape.edge_value[shape.edge_start[start] : shape.edge_start[end + 1]]] = True
    return due


def held_at_end(shape: Shape, columns: Columns, c: int) -> Ids:
    """[m] the column of S_{c+1,v}; after the last coarse stage only kept values matter."""
    if c + 1 < columns.stages:
        return columns.holds[c + 1]
    return np.where(shape.kept, ONE, ZERO)


def _runs(shape: Shape, columns: Columns, c: int, again: Ids) -> Ids:
    """[n] the column that says that an op runs in c after its first computation: R_c before c, Q inside it."""
    run = columns.runs[c].copy()
    inside = slice(columns.first[c], columns.cuts[c] + 1)
    run[inside] = again[inside]
    return run


def values_of(column: Ids, x: Floats) -> Floats:
    """What a table of columns holds at a solution."""
    return np.where(column >= 0, x[np.maximum(column, 0)] if len(x) else 0.0, np.where(column == ONE, 1.0, 0.0))
