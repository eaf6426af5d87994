"""What all stage programs share: the columns of R, S and K, the room for memory, the rows of retention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..array_view import ArrayView, Ids
from ..program import Booleans, Builder, Floats, Term
from .schedule import Matrices, Stages


@dataclass(frozen=True, eq=False)
class Columns:
    """Column indices, −1 where there is no such variable: there it is 0.

    Attributes:
        compute: [stages, ops] R: the op runs in the stage.
        retain: [stages + 1, values] S: the value is resident when the stage begins. The last row, after all stages, is
            empty: what must stay to the end is a constant.
        keep: [stages, values] K: the stage's computation keeps this optional value.
        made: [stages, values] the column by which the stage makes the value: K of an optional value, else R of its op.
    """

    compute: Ids
    retain: Ids
    keep: Ids
    made: Ids


def stage_columns(
    builder: Builder,
    view: ArrayView,
    stage_of: Stages,
    *,
    cost: Floats,
    runs: Booleans,
    retains: Booleans,
    keeps: Booleans,
    holds: Booleans | None = None,
) -> Columns:
    """Add the binaries R, S and K where the masks allow them.

    (1a) minimises the cost of R. (1d) fixes R of a stage's frontier to 1. `holds` marks the S that are known to be 1.
    """
    first = (np.arange(view.ops) == stage_of.frontier[:, None]) & stage_of.advances[:, None]
    stage, op = np.nonzero(runs)
    compute = _placed(runs, builder.variables(len(op), cost=cost[op], lower=first[stage, op]))
    sure = np.zeros(int(retains.sum())) if holds is None else holds[retains]
    retain = _placed(retains, builder.variables(int(retains.sum()), lower=sure))
    keep = _placed(keeps, builder.variables(int(keeps.sum())))
    made = np.where(view.optional, keep, compute[:, view.maker]) if view.values else keep
    return Columns(compute, retain, keep, made)


def _placed(mask: Booleans, columns: Ids) -> Ids:
    placed = np.full(mask.shape, -1, dtype=np.int64)
    placed[mask] = columns
    return placed


def picked(row: ArrayLike, column: NDArray[Any], value: ArrayLike = 1.0) -> Term:
    """A term without the entries that have no column."""
    rows, columns, values = np.broadcast_arrays(np.asarray(row), column, np.asarray(value, dtype=np.float64))
    there = columns >= 0
    return Term(rows[there], columns[there], values[there])


def add_keeping_needs_computing(builder: Builder, columns: Columns, view: ArrayView) -> None:
    """K[s,v] ≤ R[s,maker(v)]: a value is kept only from a computation that takes place."""
    stage, value = np.nonzero(columns.keep >= 0)
    each = np.arange(len(stage))
    op = columns.compute[stage, view.maker[value]]
    builder.add_rows(
        len(stage), [Term(each, columns.keep[stage, value]), picked(each, op, -1.0)], upper=np.zeros(len(stage))
    )


def add_retention(builder: Builder, columns: Columns, which: Booleans | None = None) -> None:
    """(1c): S[s+1,v] ≤ MADE[s,v] + S[s,v]: what is retained was made in the stage before, or retained into it.

    `which`: [stages, values] where the row is wanted; everywhere if None.
    """
    wanted = columns.retain[1:] >= 0
    stage, value = np.nonzero(wanted if which is None else wanted & which)
    each = np.arange(len(stage))
    builder.add_rows(
        len(stage),
        [
            Term(each, columns.retain[stage + 1, value]),
            picked(each, columns.made[stage, value], -1.0),
            picked(each, columns.retain[stage, value], -1.0),
        ],
        upper=np.zeros(len(stage)),
    )


def room(view: ArrayView, stage_of: Stages) -> tuple[Floats, float]:
    """[stages, ops] what is left of the budget for values that are a choice, and the unit of memory in bytes.

    Taken off: fixed bytes, and the values that stay to the end, once they are made. They are a constant: the op that
    makes them runs once, at its first computation, before which none of them is there. The unit is the budget without
    fixed bytes, so memory rows have right-hand sides near 1.
    """
    kept_bytes = np.bincount(view.maker, view.size * view.kept, minlength=view.ops)
    before = np.concatenate(([0.0], np.cumsum(kept_bytes)))
    held = before[stage_of.frontier][:, None] + np.where(
        np.arange(view.ops) == stage_of.frontier[:, None], kept_bytes, 0.0
    )
    free = view.capacity
    unit = float(max(free, 1))
    return (free - held) / unit, unit


def filled(columns: Columns, view: ArrayView, matrices: Matrices, count: int) -> Floats:
    """[columns] a start with R, S and K set from a plan's matrices, the rest 0."""
    x = np.zeros(count)
    for placed, values in (
        (columns.compute, matrices.computed),
        (columns.retain, matrices.retained),
        (columns.keep, matrices.made),
    ):
        there = placed >= 0
        x[placed[there]] = values[there]
    return x


def made_bytes(view: ArrayView, matrices: Matrices) -> Floats:
    """[stages, values] bytes that a stage's computation adds while its op runs: kept values not counted."""
    produced = matrices.computed[:, view.maker] & ~view.kept & (~view.optional | matrices.made)
    return np.asarray(produced * view.size)
