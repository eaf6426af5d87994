"""The columns and rows that stage programs are made of: R, S and K, the room for memory, the rows of retention.

In tight programs the A variables say which value stays resident from one event of a stage to the next; U goes from slot
to slot, and the memory of first computations stands there once more as knapsacks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Booleans, Builder, Floats, Term, scattered
from .formulation import Matrices, Stages


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
    compute = builder.variables_at(runs, cost=cost[op], lower=first[stage, op])
    sure = np.zeros(int(retains.sum())) if holds is None else holds[retains]
    retain = builder.variables_at(retains, lower=sure)
    keep = builder.variables_at(keeps)
    made = np.where(view.optional, keep, compute[:, view.maker]) if view.values else keep
    return Columns(compute, retain, keep, made)


def add_keeping_needs_computing(builder: Builder, columns: Columns, view: ArrayView) -> None:
    """K[s,v] ≤ R[s,maker(v)]: a value is kept only from a computation that takes place."""
    stage, value = np.nonzero(columns.keep >= 0)
    builder.add_implied(columns.keep[stage, value], columns.compute[stage, view.maker[value]])


def add_retention(builder: Builder, columns: Columns, which: Booleans | None = None) -> None:
    """(1c): S[s+1,v] ≤ MADE[s,v] + S[s,v]: what is retained was made in the stage before, or retained into it.

    `which`: [stages, values] where the row is wanted; everywhere if None.
    """
    wanted = columns.retain[1:] >= 0
    stage, value = np.nonzero(wanted if which is None else wanted & which)
    builder.add_implied(columns.retain[stage + 1, value], columns.made[stage, value], columns.retain[stage, value])


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


def filled(columns: Columns, matrices: Matrices, count: int, *more: tuple[Ids, Booleans]) -> Floats:
    """[columns] a start with R, S and K set from a plan's matrices, and `more` columns to values; the rest 0."""
    x = np.zeros(count)
    for placed, values in (
        (columns.compute, matrices.computed),
        (columns.retain, matrices.retained),
        (columns.keep, matrices.made),
        *more,
    ):
        there = placed >= 0
        x[placed[there]] = values[there]
    return x


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
    """

    column: Ids
    after: Ids
    begins: Ids
    first: Ids


def add_residency(builder: Builder, columns: Columns, view: ArrayView, stage_of: Stages) -> Residency:
    """Add the A columns and all rows that say how residency begins, goes on and ends."""
    held = residency_columns(builder, columns, view, stage_of)
    # R[s,k] ≤ A[s,(v,k)]: an op that runs has its inputs resident; (1b) follows with the start of residency
    stage, use = np.nonzero(held.column >= 0)
    builder.add_implied(columns.compute[stage, view.uses.op[use]], held.column[stage, use])
    # A[s,first use of v] ≤ MADE[s,v] + S[s,v]: residency begins by computation or by retention. All readers of v have
    # larger indices than its maker, and a stage runs in index order: a stage that makes v makes it before its first use
    stage, value = np.nonzero(held.first >= 0)
    first = held.column[stage, held.first[stage, value]]
    builder.add_implied(first, columns.made[stage, value], columns.retain[stage, value])
    # A[s,next e] ≤ A[s,e], and S[s+1,v] ≤ A[s,last e]: what is there later in the stage was there all along. Within a
    # stage a value is made once at most, before its uses, so it cannot come back
    stage, use = np.nonzero((held.column >= 0) & (held.after >= 0))
    builder.add_implied(held.after[stage, use], held.column[stage, use])
    # (1c) for values without a use in the stage; for the others it follows from the chain
    add_retention(builder, columns, held.first < 0)
    add_keeping_needs_computing(builder, columns, view)
    return held


def residency_columns(builder: Builder, columns: Columns, view: ArrayView, stage_of: Stages) -> Residency:
    """Add A[s,e] for each use by an op that may run in the stage; 1 where it must."""
    op_runs = columns.compute[:, view.uses.op]
    there = op_runs >= 0
    sure = (view.uses.op == stage_of.frontier[:, None]) & stage_of.advances[:, None]
    column = builder.variables_at(there, lower=sure[there], integer=False)
    after = np.full(there.shape, -1, dtype=np.int64)
    begins = columns.retain[1:].copy()
    first = np.full(begins.shape, -1, dtype=np.int64)
    # from the last use of a value to its first: `begins` holds what is known of the time after the use before
    for use in range(view.uses.count - 1, -1, -1):
        if not use % _POLL:
            builder.look()
        value = view.uses.value[use]
        runs = there[:, use]
        after[:, use] = begins[:, value]
        begins[runs, value] = column[runs, use]
        first[runs, value] = use
    return Residency(column, after, begins, first)


def residents(view: ArrayView, matrices: Matrices) -> Booleans:
    """[stages, uses] A of a plan's matrices: this use or a later event of the stage needs the value."""
    after = matrices.retained[1:]
    present = matrices.computed[:, view.uses.op].copy()
    for use in range(view.uses.count - 1, -1, -1):
        follower = view.uses.next[use]
        present[:, use] |= after[:, view.uses.value[use]] if follower < 0 else present[:, follower]
    return present


@dataclass(frozen=True, eq=False)
class Memory:
    """The U columns, [slots] in stage and op order, and the change of memory at each slot as (slot, column, weight)."""

    column: Ids
    begins_stage: Booleans
    changes: tuple[Term, ...]

    def filled(self, x: Floats) -> Floats:
        """A start, whose other columns are set, with U set too."""
        change = np.zeros(len(self.column))
        for slot, column, weight in (map(np.asarray, term) for term in self.changes):
            there = column >= 0
            np.add.at(change, slot[there], x[column[there]] * weight[there])
        total = np.cumsum(change)
        starts = np.flatnonzero(self.begins_stage)
        before = np.where(starts > 0, total[starts - 1], 0.0)
        x[self.column] = total - np.repeat(before, np.diff([*starts, len(total)]))
        return x


def add_changes(
    builder: Builder,
    begins_stage: Booleans,
    changes: tuple[Term, ...],
    runs: Ids,
    sure: Booleans,
    limit: Floats,
    workspace: Floats,
) -> Memory:
    """Add U: at each slot that of the slot before in its stage, plus the changes; U + workspace · R ≤ limit.

    All are [slots]; `runs` are the columns of R, and `sure` says where R is 1.
    """
    column = builder.variables(len(runs), upper=np.where(sure, limit - workspace, limit), integer=False)
    each, rest = np.arange(len(runs)), np.flatnonzero(~begins_stage)
    negated = tuple(Term(term.row, term.column, -np.asarray(term.value)) for term in changes)
    terms = [Term(each, column), Term(rest, column[rest - 1], -1.0), *negated]
    builder.add_rows(len(runs), terms, lower=0.0, upper=0.0)
    busy = np.flatnonzero(~sure & (runs >= 0) & (workspace > 0))
    each = np.arange(len(busy))
    builder.add_rows(len(busy), [Term(each, column[busy]), Term(each, runs[busy], workspace[busy])], upper=limit[busy])
    return Memory(column, begins_stage, changes)


def add_memory(builder: Builder, columns: Columns, view: ArrayView, stage_of: Stages, held: Residency) -> Memory:
    """(8) at each slot (s,k) where op k may run: U[s,k] + workspace · R[s,k] ≤ room, in units of the room.

    U is written as changes from slot to slot, which keeps rows short. Until its maker's index has passed, a value
    counts S[s,v]; while its maker runs, MADE[s,v] too; then `begins` (A of its first use, or S[s+1,v]); after each use
    `after`. At a slot whose op does not run this is no more than what the op before left behind, so the rows of idle
    slots cut off nothing.
    """
    left, unit = room(view, stage_of)
    weight, workspace = view.size / unit, view.workspace / unit
    stage, op = np.nonzero(columns.compute >= 0)
    slots = len(op)
    slot = scattered(columns.compute >= 0, np.arange(slots))
    after = following(slot)
    begins_stage = np.concatenate(([True], stage[1:] != stage[:-1])) if slots else np.zeros(0, dtype=np.bool_)
    first_slot = np.zeros(stage_of.count, dtype=np.int64)
    first_slot[stage[begins_stage]] = np.flatnonzero(begins_stage)
    charged = ~view.kept
    retain_stage, retained = np.nonzero(columns.retain[:-1] >= 0)
    made_stage, made = np.nonzero((columns.made >= 0) & charged)
    passed = after[:, view.maker]  # the first slot after a value's maker
    turn_stage, turn = np.nonzero((passed >= 0) & charged)
    turn_slot = passed[turn_stage, turn]
    used = np.where(held.column >= 0, after[:, view.uses.op], -1)
    use_stage, use = np.nonzero(used >= 0)
    use_slot, use_weight = used[use_stage, use], weight[view.uses.value[use]]
    changes = (
        Term(first_slot[retain_stage], columns.retain[retain_stage, retained], weight[retained]),
        Term(slot[made_stage, view.maker[made]], columns.made[made_stage, made], weight[made]),
        Term(turn_slot, held.begins[turn_stage, turn], weight[turn]),
        Term(turn_slot, columns.made[turn_stage, turn], -weight[turn]),
        Term(turn_slot, columns.retain[turn_stage, turn], -weight[turn]),
        Term(use_slot, held.after[use_stage, use], use_weight),
        Term(use_slot, held.column[use_stage, use], -use_weight),
    )
    first = (op == stage_of.frontier[stage]) & stage_of.advances[stage]
    return add_changes(
        builder, begins_stage, changes, columns.compute[stage, op], first, left[stage, op], workspace[op]
    )


def following(slot: Ids) -> Ids:
    """[stages, ops] the first slot of the stage after each op, or −1."""
    after = np.full(slot.shape, -1, dtype=np.int64)
    for op in range(slot.shape[1] - 2, -1, -1):
        after[:, op] = np.where(slot[:, op + 1] >= 0, slot[:, op + 1], after[:, op + 1])
    return after


def add_frontier_memory(builder: Builder, columns: Columns, view: ArrayView, stage_of: Stages) -> None:
    """Memory at slot (t,t): inputs and outputs of t, and what is retained next to them, S[s+1,v] ≤ room, as a knapsack.

    It repeats what U says there: at its first computation, op t is the last of its stage, so what is resident next to
    its inputs is what the next stage retains.
    """
    left, unit = room(view, stage_of)
    weight = view.size / unit
    stage = np.flatnonzero(stage_of.advances)
    op = stage_of.frontier[stage]
    reads = np.zeros((view.ops, view.values), dtype=np.bool_)
    reads[view.uses.op, view.uses.value] = True
    beside = (columns.retain[stage + 1] >= 0) & ~reads[op] & (view.maker != op[:, None])
    makes = (columns.made[stage] >= 0) & (view.maker == op[:, None]) & ~view.kept
    row, value = np.nonzero(beside)
    made_row, made = np.nonzero(makes)
    inputs = reads[op] @ weight
    builder.add_rows(
        len(stage),
        [
            Term(row, columns.retain[stage[row] + 1, value], weight[value]),
            Term(made_row, columns.made[stage[made_row], made], weight[made]),
        ],
        upper=left[stage, op] - inputs - view.workspace[op] / unit,
    )
