"""The A variables of the tight program: which value stays resident from one event of a stage to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Booleans, Builder, Term
from .columns import Columns, add_retention, picked
from .schedule import Matrices, Stages

_POLL = 64
"""Uses between two looks at the clock."""


@dataclass(frozen=True, eq=False)
class Residency:
    """The A columns and how the uses of a value follow each other within each stage.

    Attributes:
        column: [stages, uses] the column of A, −1 where the op does not run.
        after: [stages, uses] the column that tells whether the value is resident after the use: A of its next use in
            the stage, else S of the next stage, else −1.
        begins: [stages, values] the same for the time after the value's computation.
        first: [stages, values] the value's first use in the stage, or −1.
        last: [stages, values] its last use there, or −1.
    """

    column: Ids
    after: Ids
    begins: Ids
    first: Ids
    last: Ids


def residency_columns(builder: Builder, columns: Columns, view: ArrayView, stage_of: Stages) -> Residency:
    """Add A[s,e] for each use by an op that may run in the stage; 1 where it must."""
    op_runs = columns.compute[:, view.uses.op]
    there = op_runs >= 0
    sure = (view.uses.op == stage_of.frontier[:, None]) & stage_of.advances[:, None]
    column = np.full(there.shape, -1, dtype=np.int64)
    column[there] = builder.variables(int(there.sum()), lower=sure[there], integer=False)
    count = len(there)
    next_retained = columns.retain[1:]
    after = np.full(there.shape, -1, dtype=np.int64)
    begins = next_retained.copy()
    first = np.full((count, view.values), -1, dtype=np.int64)
    last = np.full((count, view.values), -1, dtype=np.int64)
    # from the last use of a value to its first: `begins` holds what is known of the time after the use before
    for use in range(view.uses.count - 1, -1, -1):
        if not use % _POLL:
            builder.look()
        value = view.uses.value[use]
        runs = there[:, use]
        after[:, use] = begins[:, value]
        begins[runs, value] = column[runs, use]
        last[runs & (first[:, value] < 0), value] = use
        first[runs, value] = use
    return Residency(column, after, begins, first, last)


def add_uses_of_residency(builder: Builder, columns: Columns, view: ArrayView, held: Residency) -> None:
    """R[s,k] ≤ A[s,(v,k)]: an op that runs has its inputs resident; (1b) follows with the start of residency."""
    stage, use = np.nonzero(held.column >= 0)
    each = np.arange(len(use))
    builder.add_rows(
        len(use),
        [Term(each, columns.compute[stage, view.uses.op[use]]), Term(each, held.column[stage, use], -1.0)],
        upper=np.zeros(len(use)),
    )


def add_start_of_residency(builder: Builder, columns: Columns, view: ArrayView, held: Residency) -> None:
    """A[s,first use of v] ≤ MADE[s,v] + S[s,v]: residency begins by computation or by retention.

    All readers of v have larger indices than its maker, and a stage runs in index order: so a stage that makes v makes
    it before its first use there.
    """
    stage, value = np.nonzero(held.first >= 0)
    each = np.arange(len(value))
    builder.add_rows(
        len(value),
        [
            Term(each, held.column[stage, held.first[stage, value]]),
            picked(each, columns.made[stage, value], -1.0),
            picked(each, columns.retain[stage, value], -1.0),
        ],
        upper=np.zeros(len(value)),
    )


def add_residency_chain(builder: Builder, view: ArrayView, held: Residency) -> None:
    """A[s,next e] ≤ A[s,e], and S[s+1,v] ≤ A[s,last e]: what is there later in the stage was there all along.

    Within a stage a value is made once at most, before its uses, so it cannot come back.
    """
    stage, use = np.nonzero((held.column >= 0) & (held.after >= 0))
    each = np.arange(len(use))
    builder.add_rows(
        len(use),
        [Term(each, held.after[stage, use]), Term(each, held.column[stage, use], -1.0)],
        upper=np.zeros(len(use)),
    )


def add_retention_of_residents(builder: Builder, columns: Columns, view: ArrayView, held: Residency) -> None:
    """(1c) for values without a use in the stage; for the others it follows from the chain."""
    add_retention(builder, columns, held.first < 0)


def residents(view: ArrayView, matrices: Matrices) -> Booleans:
    """[stages, uses] A of a plan's matrices: this use or a later event of the stage needs the value."""
    after = matrices.retained[1:]
    present = matrices.computed[:, view.uses.op].copy()
    for use in range(view.uses.count - 1, -1, -1):
        follower = view.uses.next[use]
        present[:, use] |= after[:, view.uses.value[use]] if follower < 0 else present[:, follower]
    return present
