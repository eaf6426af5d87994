"""The stage program with disaggregated residency, and exact reductions: the same optimum as Checkmate's, much faster.

Instead of FREE with its big-M rows (7b, 7c) there is A[s,e] for every use e = (v,k): value v is resident in stage s
from its previous event (the start of the stage, its computation, or its use before) until op k has run. FREE of the
paper is A[s,e] − A[s,next e]; all rows on A are 0/±1, so the LP relaxation is far tighter, and A needs no integrality.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..program import Booleans, Builder, Floats, Term
from .columns import Columns, add_keeping_needs_computing, filled, stage_columns
from .formulation import Formulation, cost_units
from .memory import add_frontier_memory, add_memory
from .residency import (
    add_residency_chain,
    add_retention_of_residents,
    add_start_of_residency,
    add_uses_of_residency,
    residency_columns,
    residents,
)
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
