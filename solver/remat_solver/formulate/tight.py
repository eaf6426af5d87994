"""The stage program with disaggregated residency, and exact reductions: the same optimum as Checkmate's, much faster.

Instead of FREE with its big-M rows (7b, 7c) there is A[s,e] for every use e = (v,k): value v is resident in stage s
from its previous event (the start of the stage, its computation, or its use before) until op k has run. FREE of the
paper is A[s,e] − A[s,next e]; all rows on A are 0/±1, so the LP relaxation is far tighter, and A needs no integrality.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..array_view import ArrayView
from ..deadline import never
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


@dataclass(frozen=True)
class Reductions:
    """What may be switched off; each changes the time that a proof takes, never the optimum.

    Attributes:
        collapse: no recomputation while everything that can still be of use fits.
        reach: nothing is retained or recomputed that no op still to come depends on.
        exclusive: no value is retained into a stage that computes its op again.
        pinned: values of ops that may not run any more stay until their last use.
        frontier: the memory at each first computation once more as one knapsack row, from which engines cut covers:
            about twice as fast.
    """

    collapse: bool = True
    reach: bool = True
    exclusive: bool = True
    pinned: bool = True
    frontier: bool = True


def tight(
    view: ArrayView,
    *,
    sweeps: int = 1,
    reductions: Reductions = Reductions(),
    stop: Callable[[], bool] = never,
) -> Formulation:
    """The program of one recomputation per op and stage, or of `sweeps`. Where `stop` says so, `TimeUp` is raised."""
    return _tight(view, sweeps, reductions, 0, view.ops, stop)


def forward(view: ArrayView, *, reductions: Reductions = Reductions(), stop: Callable[[], bool] = never) -> Formulation:
    """The tight program where only ops before `backward_from` are recomputed, and only from its stage on.

    A restriction: its optimum is one of the restricted space. It leaves far fewer binaries.
    """
    border = view.graph.backward_from
    assert border is not None
    only = view.without_recomputing(np.arange(view.ops) >= border)
    return _tight(only, 1, reductions, border, border, stop)


def _tight(
    view: ArrayView, sweeps: int, reductions: Reductions, least_stage: int, most_op: int, stop: Callable[[], bool]
) -> Formulation:
    """The program where ops before `most_op` are recomputed in the stages of frontiers from `least_stage` on."""
    first = collapsed_stages(view) if reductions.collapse else 0
    builder, stage_of = Builder(stop), stages(view.ops, sweeps, first)
    cost, unit_ns, whole = cost_units(view)
    allowed = (stage_of.frontier[:, None] >= least_stage) & (np.arange(view.ops) < most_op)
    runs = recomputable(view, stage_of, allowed)
    retains, holds, keeps = _masks(view, stage_of, first, runs, reductions)
    columns = stage_columns(builder, view, stage_of, cost=cost, runs=runs, retains=retains, keeps=keeps, holds=holds)
    held = residency_columns(builder, columns, view, stage_of)
    add_uses_of_residency(builder, columns, view, held)
    add_start_of_residency(builder, columns, view, held)
    add_residency_chain(builder, view, held)
    add_retention_of_residents(builder, columns, view, held)
    add_keeping_needs_computing(builder, columns, view)
    if reductions.exclusive:
        add_exclusive(builder, columns, view)
    memory = add_memory(builder, columns, view, stage_of, held)
    if reductions.frontier:
        add_frontier_memory(builder, columns, view, stage_of)
    program = builder.program(offset=float(cost[:first].sum()))

    def complete(matrices: Matrices) -> Floats:
        x = filled(columns, view, matrices, program.columns)
        present = residents(view, matrices)
        x[held.column[held.column >= 0]] = present[held.column >= 0]
        memory.fill(x)
        return x

    return Formulation(view, stage_of, program, columns.compute, columns.retain, complete, unit_ns, whole)


def collapsed_stages(view: ArrayView) -> int:
    """How many first stages need no recomputation: in each of them, all that can still be of use fits the budget.

    Take any plan. In these stages drop its recomputations and keep every value, optional ones too, that can still serve
    the first computation of an op of the stage or after, however far down. What the plan retains into the next stage is
    there, since it was made; what it holds that is not kept here is of no use any more. So nothing costs more, and it
    fits. (With the memory profile of the plain plan in place of "all that can still be of use" this would be false.)
    """
    ends = np.where(view.kept, view.ops, np.minimum(view.value_reach + 1, view.ops))  # of its use, after its maker
    begun = np.bincount(view.maker, view.size * (ends > view.maker + 1), minlength=view.ops + 1)
    ended = np.bincount(ends, view.size * (ends > view.maker + 1), minlength=view.ops + 1)
    # what was made before an op and is of use; sums of whole bytes, exact in float64
    before = np.cumsum(np.concatenate(([0.0], begun[: view.ops - 1])) - ended[: view.ops])
    mine = np.bincount(view.maker, view.size * (~view.optional | (view.value_reach > view.maker)), minlength=view.ops)
    over = np.flatnonzero(before + mine + view.workspace > view.capacity)
    # where everything fits, the last stage stays, so that there is a program
    return int(over[0]) if len(over) else view.ops - 1


def _masks(
    view: ArrayView, stage_of: Stages, first: int, runs: Booleans, reductions: Reductions
) -> tuple[Booleans, Booleans, Booleans]:
    """Where S and K exist, and where S is 1; takes R from `runs` where it is of no use.

    `reach`: in the stage of frontier f, a value is of use only if it can serve the first computation of an op at or
    after f, for all ops before f have run.

    `pinned`: a value whose op may not run any more cannot be made again, so it stays until its last reader has first
    run.
    """
    frontier = stage_of.frontier[:, None]
    earlier = (view.maker < frontier) & ~view.kept
    keeps_value = np.broadcast_to(view.optional, earlier.shape)
    if reductions.reach:
        needed = view.value_reach >= frontier
        earlier = earlier & needed
        keeps_value = keeps_value & needed
        runs &= (np.arange(view.ops) == frontier) | (view.op_reach >= frontier)
    # stage 0 has nothing to retain, unless stages before it were collapsed
    if first == 0:
        earlier[0] = False
    retains = np.vstack((earlier, np.zeros((1, view.values), dtype=np.bool_)))
    keeps = runs[:, view.maker] & keeps_value
    gone = (view.last_stage[view.maker] < frontier) & (view.last_reader >= frontier)
    sure = gone if reductions.pinned else np.zeros_like(earlier)
    holds = retains & np.vstack((sure, np.zeros((1, view.values), dtype=np.bool_)))
    return retains, holds, keeps


def add_exclusive(builder: Builder, columns: Columns, view: ArrayView) -> None:
    """R[s,maker(v)] + S[s,v] ≤ 1: a stage that runs v's maker has not retained v.

    Exact: v is read in the stage only after its maker's index, so what was retained would be held for nothing. For a
    value that is always made the verifier demands it: nothing is made while it is resident.
    """
    maker = columns.compute[:, view.maker]
    stage, value = np.nonzero((maker >= 0) & (columns.retain[:-1] >= 0))
    each = np.arange(len(value))
    builder.add_rows(
        len(value),
        [Term(each, maker[stage, value]), Term(each, columns.retain[stage, value])],
        upper=np.ones(len(value)),
    )
