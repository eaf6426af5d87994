"""The stage program with disaggregated residency, and exact reductions: the same optimum as Checkmate's, much faster.

Instead of FREE with its big-M rows (7b, 7c) there is A[s,e] for every use e = (v,k): value v is resident in stage s
from its previous event (the start of the stage, its computation, or its use before) until op k has run. FREE of the
paper is A[s,e] − A[s,next e]; all rows on A are 0/±1, so the LP relaxation is far tighter, and A needs no integrality.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..program import Booleans, Builder, Floats, Term
from .columns import (
    Columns,
    add_keeping_needs_computing,
    add_retention,
    filled,
    picked,
    room,
    stage_columns,
)
from .formulation import Formulation, cost_units
from .schedule import Matrices, Stages, recomputable, stages
from .tables import Index, Tables, without_recomputing


@dataclass(frozen=True)
class Reductions:
    """What may be switched off; each changes the time that a proof takes, never the optimum.

    Attributes:
        collapse: no recomputation while everything that can still be of use fits.
        reach: nothing is retained or recomputed that no op still to come depends on.
        exclusive: no value is retained into a stage that computes its op again.
        pinned: values of ops that run once stay until their last use.
        useful: what is retained or recomputed is used in the stage or retained by it. More rows for the same LP bound,
            at times a faster proof and at times a slower one: off.
        frontier: the memory at each first computation once more as one knapsack row, from which engines cut covers:
            about twice as fast.
    """

    collapse: bool = True
    reach: bool = True
    exclusive: bool = True
    pinned: bool = True
    useful: bool = False
    frontier: bool = True


def tight(
    table: Tables,
    budget_bytes: int,
    *,
    sweeps: int = 1,
    reductions: Reductions = Reductions(),
) -> Formulation:
    """The program of one recomputation per op and stage, or of `sweeps`."""
    return _tight(table, budget_bytes, sweeps, reductions, 0, table.ops)


def forward(table: Tables, budget_bytes: int, *, reductions: Reductions = Reductions()) -> Formulation:
    """The tight program where only ops before `backward_from` are recomputed, and only from its stage on.

    A restriction: its optimum is one of the restricted space. It leaves far fewer binaries.
    """
    border = table.graph.backward_from
    assert border is not None
    only = without_recomputing(table, np.arange(table.ops) >= border)
    return _tight(only, budget_bytes, 1, reductions, border, border)


def _tight(
    table: Tables, budget_bytes: int, sweeps: int, reductions: Reductions, least_stage: int, most_op: int
) -> Formulation:
    """The program where ops before `most_op` are recomputed in the stages of frontiers from `least_stage` on."""
    first = collapsed_stages(table, budget_bytes) if reductions.collapse else 0
    builder, stage_of = Builder(), stages(table.ops, sweeps, first)
    cost, unit_ns, whole = cost_units(table)
    allowed = (stage_of.frontier[:, None] >= least_stage) & (np.arange(table.ops) < most_op)
    runs = recomputable(table, stage_of, allowed)
    retains, holds, keeps = _masks(table, stage_of, first, runs, reductions)
    columns = stage_columns(builder, table, stage_of, cost=cost, runs=runs, retains=retains, keeps=keeps, holds=holds)
    held = residency_columns(builder, columns, table, stage_of)
    add_uses_of_residency(builder, columns, table, held)
    add_start_of_residency(builder, columns, table, held)
    add_residency_chain(builder, table, held)
    add_retention_of_residents(builder, columns, table, held)
    add_keeping_needs_computing(builder, columns, table)
    if reductions.exclusive:
        add_exclusive(builder, columns, table)
    if reductions.useful:
        add_useful(builder, columns, table)
    memory = add_memory(builder, columns, table, stage_of, budget_bytes, held)
    if reductions.frontier:
        add_frontier_memory(builder, columns, table, stage_of, budget_bytes)
    program = builder.program(offset=float(cost[:first].sum()))

    def complete(matrices: Matrices) -> Floats:
        x = filled(columns, table, matrices, program.columns)
        present = residents(table, matrices)
        x[held.column[held.column >= 0]] = present[held.column >= 0]
        memory.fill(x)
        return x

    return Formulation(table, stage_of, program, columns.compute, columns.retain, complete, unit_ns, whole)


def collapsed_stages(table: Tables, budget_bytes: int) -> int:
    """How many first stages need no recomputation: in each of them, all that can still be of use fits the budget.

    Take any plan. In these stages drop its recomputations and keep every value, optional ones too, that can still serve
    the first computation of an op of the stage or after, however far down. What the plan retains into the next stage is
    there, since it was made; what it holds that is not kept here is of no use any more. So nothing costs more, and it
    fits. (With the memory profile of the plain plan in place of "all that can still be of use" this would be false.)
    """
    kept_bytes = budget_bytes - table.graph.fixed_bytes
    for op in range(table.ops):
        before = (table.maker < op) & ((table.reach >= op) | table.kept)
        mine = (table.maker == op) & (~table.optional | (table.reach > op))
        if float(table.size[before | mine].sum()) + float(table.workspace[op]) > kept_bytes:
            return op
    # everything fits: the last stage stays, so that there is a program
    return table.ops - 1


def _masks(
    table: Tables, stage_of: Stages, first: int, runs: Booleans, reductions: Reductions
) -> tuple[Booleans, Booleans, Booleans]:
    """Where S and K exist, and where S is 1; takes R from `runs` where it is of no use.

    `reach`: in the stage of frontier f, a value is of use only if it can serve the first computation of an op at or
    after f, for all ops before f have run.

    `pinned`: a value of an op that runs once cannot be made again, so it stays until its last reader has first run.
    """
    frontier = stage_of.frontier[:, None]
    earlier = (table.maker < frontier) & ~table.kept
    keeps_value = np.broadcast_to(table.optional, earlier.shape)
    if reductions.reach:
        needed = table.reach >= frontier
        earlier = earlier & needed
        keeps_value = keeps_value & needed
        runs &= (np.arange(table.ops) == frontier) | (table.op_reach >= frontier)
    # stage 0 has nothing to retain, unless stages before it were collapsed
    if first == 0:
        earlier[0] = False
    retains = np.vstack((earlier, np.zeros((1, table.values), dtype=np.bool_)))
    keeps = runs[:, table.maker] & keeps_value
    last_reader = np.where(table.last_use >= 0, table.use_op[table.last_use], -1) if table.uses else table.last_use
    sure = table.pinned[table.maker] & (last_reader >= frontier) if reductions.pinned else np.zeros_like(earlier)
    holds = retains & np.vstack((sure, np.zeros((1, table.values), dtype=np.bool_)))
    return retains, holds, keeps


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

    column: Index
    after: Index
    begins: Index
    first: Index
    last: Index


def residency_columns(builder: Builder, columns: Columns, table: Tables, stage_of: Stages) -> Residency:
    """Add A[s,e] for each use by an op that may run in the stage; 1 where it must."""
    op_runs = columns.compute[:, table.use_op]
    there = op_runs >= 0
    sure = (table.use_op == stage_of.frontier[:, None]) & stage_of.advances[:, None]
    column = np.full(there.shape, -1, dtype=np.int64)
    column[there] = builder.variables(int(there.sum()), lower=sure[there], integer=False)
    count = len(there)
    next_retained = columns.retain[1:]
    after = np.full(there.shape, -1, dtype=np.int64)
    begins = next_retained.copy()
    first = np.full((count, table.values), -1, dtype=np.int64)
    last = np.full((count, table.values), -1, dtype=np.int64)
    # from the last use of a value to its first: `begins` holds what is known of the time after the use before
    for use in range(table.uses - 1, -1, -1):
        value = table.use_value[use]
        runs = there[:, use]
        after[:, use] = begins[:, value]
        begins[runs, value] = column[runs, use]
        last[runs & (first[:, value] < 0), value] = use
        first[runs, value] = use
    return Residency(column, after, begins, first, last)


def add_uses_of_residency(builder: Builder, columns: Columns, table: Tables, held: Residency) -> None:
    """R[s,k] ≤ A[s,(v,k)]: an op that runs has its inputs resident; (1b) follows with the start of residency."""
    stage, use = np.nonzero(held.column >= 0)
    each = np.arange(len(use))
    builder.add_rows(
        len(use),
        [Term(each, columns.compute[stage, table.use_op[use]]), Term(each, held.column[stage, use], -1.0)],
        upper=np.zeros(len(use)),
    )


def add_start_of_residency(builder: Builder, columns: Columns, table: Tables, held: Residency) -> None:
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


def add_residency_chain(builder: Builder, table: Tables, held: Residency) -> None:
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


def add_retention_of_residents(builder: Builder, columns: Columns, table: Tables, held: Residency) -> None:
    """(1c) for values without a use in the stage; for the others it follows from the chain."""
    add_retention(builder, columns, held.first < 0)


def add_exclusive(builder: Builder, columns: Columns, table: Tables) -> None:
    """R[s,maker(v)] + S[s,v] ≤ 1: a stage that runs v's maker has not retained v.

    Exact: v is read in the stage only after its maker's index, so what was retained would be held for nothing. For a
    value that is always made the judge demands it: nothing is made while it is resident.
    """
    maker = columns.compute[:, table.maker]
    stage, value = np.nonzero((maker >= 0) & (columns.retain[:-1] >= 0))
    each = np.arange(len(value))
    builder.add_rows(
        len(value),
        [Term(each, maker[stage, value]), Term(each, columns.retain[stage, value])],
        upper=np.ones(len(value)),
    )


def add_useful(builder: Builder, columns: Columns, table: Tables) -> None:
    """What is retained into a stage, or recomputed in it, is read in it or retained by it.

    S[s,v] ≤ S[s+1,v] + Σ R[s,j] over the readers j of v; R[s,i] ≤ the sum of that over the values of i, unless this is
    its first computation. Exact: what is not so can be left out, and costs and holds less.
    """
    stage, value = np.nonzero(columns.retain[:-1] >= 0)
    _add_used(builder, columns, table, columns.retain[:-1], stage, value, np.arange(table.values))
    first = np.zeros(columns.compute.shape, dtype=np.bool_)
    first[columns.compute >= 0] = builder.lower_of(columns.compute[columns.compute >= 0]) > 0
    stage, op = np.nonzero((columns.compute >= 0) & ~first)
    _add_used(builder, columns, table, columns.compute, stage, op, table.maker)


def _add_used(
    builder: Builder, columns: Columns, table: Tables, subject: Index, stage: Index, thing: Index, owner: Index
) -> None:
    """Rows subject[stage, thing] ≤ Σ over the values v with owner[v] = thing of S[s+1,v] and R of v's readers."""
    number = np.full(subject.shape, -1, dtype=np.int64)
    number[stage, thing] = np.arange(len(thing))
    value_row = number[:, owner]
    after = columns.retain[1:]
    retained = np.nonzero((value_row >= 0) & (after >= 0))
    use_row = value_row[:, table.use_value]
    reader = columns.compute[:, table.use_op]
    read = np.nonzero((use_row >= 0) & (reader >= 0))
    builder.add_rows(
        len(thing),
        [
            Term(np.arange(len(thing)), subject[stage, thing]),
            Term(value_row[retained], after[retained], -1.0),
            Term(use_row[read], reader[read], -1.0),
        ],
        upper=np.zeros(len(thing)),
    )


@dataclass(frozen=True, eq=False)
class Memory:
    """The U columns, [slots] in stage and op order, and the change of memory at each slot as (slot, column, weight)."""

    column: Index
    begins_stage: Booleans
    changes: tuple[Term, ...]

    def fill(self, x: Floats) -> None:
        """Set U in a start whose other columns are set."""
        change = np.zeros(len(self.column))
        for term in self.changes:
            np.add.at(change, np.asarray(term.row), x[np.asarray(term.column)] * np.asarray(term.value))
        total = np.cumsum(change)
        starts = np.flatnonzero(self.begins_stage)
        before = np.where(starts > 0, total[starts - 1], 0.0)
        x[self.column] = total - np.repeat(before, np.diff([*starts, len(total)]))


def add_memory(
    builder: Builder, columns: Columns, table: Tables, stage_of: Stages, budget_bytes: int, held: Residency
) -> Memory:
    """(8) at each slot (s,k) where op k may run: U[s,k] + workspace · R[s,k] ≤ room, in units of the room.

    U is written as changes from slot to slot, which keeps rows short. Until its maker's index has passed, a value
    counts S[s,v]; while its maker runs, MADE[s,v] too; then `begins` (A of its first use, or S[s+1,v]); after each use
    `after`. At a slot whose op does not run this is no more than what the op before left behind, so the rows of idle
    slots cut off nothing.
    """
    left, unit = room(table, stage_of, budget_bytes)
    weight, workspace = table.size / unit, table.workspace / unit
    stage, op = np.nonzero(columns.compute >= 0)
    slots = len(op)
    slot = np.full(columns.compute.shape, -1, dtype=np.int64)
    slot[stage, op] = np.arange(slots)
    following = _following(slot)
    begins_stage = np.concatenate(([True], stage[1:] != stage[:-1])) if slots else np.zeros(0, dtype=np.bool_)
    first_slot = np.zeros(stage_of.count, dtype=np.int64)
    first_slot[stage[begins_stage]] = np.flatnonzero(begins_stage)
    charged = ~table.kept
    retain_stage, retained = np.nonzero(columns.retain[:-1] >= 0)
    made_stage, made = np.nonzero((columns.made >= 0) & charged)
    passed = following[:, table.maker]  # the first slot after a value's maker
    turn_stage, turn = np.nonzero((passed >= 0) & charged)
    turn_slot = passed[turn_stage, turn]
    used = np.where(held.column >= 0, following[:, table.use_op], -1)
    use_stage, use = np.nonzero(used >= 0)
    use_slot, use_weight = used[use_stage, use], weight[table.use_value[use]]
    changes = (
        Term(first_slot[retain_stage], columns.retain[retain_stage, retained], weight[retained]),
        Term(slot[made_stage, table.maker[made]], columns.made[made_stage, made], weight[made]),
        picked(turn_slot, held.begins[turn_stage, turn], weight[turn]),
        picked(turn_slot, columns.made[turn_stage, turn], -weight[turn]),
        picked(turn_slot, columns.retain[turn_stage, turn], -weight[turn]),
        picked(use_slot, held.after[use_stage, use], use_weight),
        Term(use_slot, held.column[use_stage, use], -use_weight),
    )
    limit = left[stage, op]
    first = builder.lower_of(columns.compute[stage, op]) > 0
    column = builder.variables(slots, upper=np.where(first, limit - workspace[op], limit), integer=False)
    each, rest = np.arange(slots), np.flatnonzero(~begins_stage)
    zero = np.zeros(slots)
    negated = tuple(Term(term.row, term.column, -np.asarray(term.value)) for term in changes)
    builder.add_rows(slots, [Term(each, column), Term(rest, column[rest - 1], -1.0), *negated], lower=zero, upper=zero)
    busy = np.flatnonzero(~first & (workspace[op] > 0))
    each = np.arange(len(busy))
    builder.add_rows(
        len(busy),
        [Term(each, column[busy]), Term(each, columns.compute[stage[busy], op[busy]], workspace[op[busy]])],
        upper=limit[busy],
    )
    return Memory(column, begins_stage, changes)


def _following(slot: Index) -> Index:
    """[stages, ops] the first slot of the stage after each op, or −1."""
    following = np.full(slot.shape, -1, dtype=np.int64)
    for op in range(slot.shape[1] - 2, -1, -1):
        following[:, op] = np.where(slot[:, op + 1] >= 0, slot[:, op + 1], following[:, op + 1])
    return following


def add_frontier_memory(builder: Builder, columns: Columns, table: Tables, stage_of: Stages, budget_bytes: int) -> None:
    """Memory at slot (t,t): inputs and outputs of t, and what is retained beside them, S[s+1,v] ≤ room, as a knapsack.

    It repeats what U says there: at its first computation, op t is the last of its stage, so what is resident beside
    its inputs is what the next stage retains.
    """
    left, unit = room(table, stage_of, budget_bytes)
    weight = table.size / unit
    stage = np.flatnonzero(stage_of.advances)
    op = stage_of.frontier[stage]
    reads = np.zeros((table.ops, table.values), dtype=np.bool_)
    reads[table.use_op, table.use_value] = True
    beside = (columns.retain[stage + 1] >= 0) & ~reads[op] & (table.maker != op[:, None])
    makes = (columns.made[stage] >= 0) & (table.maker == op[:, None]) & ~table.kept
    row, value = np.nonzero(beside)
    made_row, made = np.nonzero(makes)
    inputs = reads[op] @ weight
    builder.add_rows(
        len(stage),
        [
            Term(row, columns.retain[stage[row] + 1, value], weight[value]),
            Term(made_row, columns.made[stage[made_row], made], weight[made]),
        ],
        upper=left[stage, op] - inputs - table.workspace[op] / unit,
    )


def residents(table: Tables, matrices: Matrices) -> Booleans:
    """[stages, uses] A of a plan's matrices: this use or a later event of the stage needs the value."""
    after = matrices.retained[1:]
    present = matrices.computed[:, table.use_op].copy()
    for use in range(table.uses - 1, -1, -1):
        follower = table.next_use[use]
        present[:, use] |= after[:, table.use_value[use]] if follower < 0 else present[:, follower]
    return present
