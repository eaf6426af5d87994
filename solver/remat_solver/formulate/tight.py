"""The stage program with disaggregated residency, and exact reductions: the same optimum as Checkmate's, much faster.

Instead of FREE with its big-M rows (7b, 7c) there is A[s,e] for every use e = (v,k): value v is resident in stage s
from its previous event (the start of the stage, its computation, or its use before) until op k has run. FREE of the
paper is A[s,e] − A[s,next e]; all rows on A are 0/±1, so the LP relaxation is far tighter, and A needs no integrality.

One such program chooses the op order too (Checkmate, Section 4.3), for small graphs. There are as many stages as ops.
Any op may run in any stage, in index order within it, and each runs at least once: for a graph with one last op that is
the paper's R[n,n] = 1 in place of (1d). The fixed order with one recomputation per op and stage is a part of this
space, so a bound proved here holds there too.

A plan of another order is no plan of the problem, whose order keeps random numbers, mutations and collectives in their
places. It is one of the same ops in another order: `reordered` makes that problem, on which the verifier can replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from remat_ir import Graph, Plan, Problem, plan_of
from remat_ir.graph import pinned_ops
from remat_ir.plan import without_unread

from ..array_view import ArrayView, view_of
from ..deadline import never
from ..program import INFINITY, Booleans, Builder, Floats, Term
from .formulation import Formulation, Matrices, Stages, cost_units, recomputable, stages
from .rows import Columns, add_frontier_memory, add_memory, add_residency, filled, residents, stage_columns


def tight(view: ArrayView, sweeps: int = 1, *, stop: Callable[[], bool] = never) -> Formulation:
    """The program of one recomputation per op and stage, or of `sweeps`. Where `stop` says so, `TimeUp` is raised."""
    return _tight(view, sweeps, 0, stop)


def forward(view: ArrayView, *, stop: Callable[[], bool] = never) -> Formulation:
    """The tight program where only ops before `backward_from` are recomputed, and only from its stage on.

    A restriction: its optimum is one of the restricted space. It leaves far fewer binaries.
    """
    border = view.graph.backward_from
    assert border is not None
    only = view.without_recomputing(np.arange(view.ops) >= border)
    return _tight(only, 1, border, stop)


def _tight(view: ArrayView, sweeps: int, least_stage: int, stop: Callable[[], bool]) -> Formulation:
    """The program where ops are recomputed in the stages of frontiers from `least_stage` on."""
    first = collapsed_stages(view)
    builder, stage_of = Builder(stop), stages(view.ops, sweeps, first)
    cost, unit_ns, whole = cost_units(view)
    runs = recomputable(view, stage_of, least_stage)
    retains, holds, keeps = _masks(view, stage_of, first, runs)
    columns = stage_columns(builder, view, stage_of, cost=cost, runs=runs, retains=retains, keeps=keeps, holds=holds)
    held = add_residency(builder, columns, view, stage_of)
    add_exclusive(builder, columns, view)
    memory = add_memory(builder, columns, view, stage_of, held)
    add_frontier_memory(builder, columns, view, stage_of)
    program = builder.program(offset=float(cost[:first].sum()))

    def complete(matrices: Matrices) -> Floats:
        present = (held.column, residents(view, matrices))
        return memory.filled(filled(columns, matrices, program.columns, present))

    return Formulation(view, stage_of, program, columns.compute, columns.retain, complete, unit_ns, whole)


def collapsed_stages(view: ArrayView) -> int:
    """How many first stages need no recomputation: in each of them, all that can still be of use fits the budget.

    Take any plan. In these stages drop its recomputations and keep every value, optional ones too, that can still serve
    the first computation of an op of the stage or after, however far down. What the plan retains into the next stage is
    there, since it was made; what it holds that is not kept here is of no use any more. So nothing costs more, and it
    fits. (With the memory profile of the plain plan in place of "all that can still be of use" this would be false.)
    """
    unread = np.bincount(view.maker, view.size * (view.optional & (view.value_reach <= view.maker)), view.ops)
    over = np.flatnonzero(view.held_until(view.value_reach) - unread > view.capacity)
    # where everything fits, the last stage stays, so that there is a program
    return int(over[0]) if len(over) else view.ops - 1


def _masks(view: ArrayView, stage_of: Stages, first: int, runs: Booleans) -> tuple[Booleans, Booleans, Booleans]:
    """Where S and K exist, and where S is 1; takes R from `runs` where it is of no use.

    In the stage of frontier f, a value is of use only if it can serve the first computation of an op at or after f, for
    all ops before f have run. A value whose op may not run any more cannot be made again, so it stays until its last
    reader has first run.
    """
    frontier = stage_of.frontier[:, None]
    needed = view.value_reach >= frontier
    earlier = (view.maker < frontier) & ~view.kept & needed
    runs &= (np.arange(view.ops) == frontier) | (view.op_reach >= frontier)
    # stage 0 has nothing to retain, unless stages before it were collapsed
    if first == 0:
        earlier[0] = False
    retains = np.vstack((earlier, np.zeros((1, view.values), dtype=np.bool_)))
    keeps = runs[:, view.maker] & view.optional & needed
    sure = (view.last_stage[view.maker] < frontier) & (view.last_reader >= frontier)
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
    builder.add_rows(len(value), [Term(each, maker[stage, value]), Term(each, columns.retain[stage, value])], upper=1.0)


class OrderFormulation(Formulation):
    """The program over stages without a frontier; a start, a plan in the graph's own order, is in stages with one."""

    def sequence(self, x: Floats) -> tuple[int, ...]:
        """The ops that a solution runs, in order; the first computations may be in any order."""
        rows, ops = np.nonzero(x[self.compute] > 0.5)
        return without_unread(self.view.graph, ops[np.argsort(rows, kind="stable")].tolist())


def any_order(problem: Problem, stop: Callable[[], bool] = never) -> OrderFormulation:
    """The program of `ops` stages in which each op runs at least once, in whatever order its inputs allow.

    Where `stop` says so, `TimeUp` is raised.
    """
    graph = problem.graph
    # kept values are choices here: nobody knows beforehand in which stage they appear
    view = view_of(replace(problem, subject=replace(graph, keep=())))
    pinned = np.isin(np.arange(graph.ops), sorted(pinned_ops(graph)))
    kept = np.isin(np.arange(graph.values), graph.keep)
    builder = Builder(stop)
    stage_of = Stages(np.full(graph.ops, graph.ops), np.zeros(graph.ops, dtype=np.bool_), 1)
    cost, unit_ns, whole = cost_units(view)
    everywhere = np.ones((graph.ops, graph.ops), dtype=np.bool_)
    retains = np.ones((graph.ops + 1, graph.values), dtype=np.bool_)
    retains[0], retains[-1] = False, kept
    holds = np.zeros_like(retains)
    holds[-1] = kept
    keeps = np.broadcast_to(view.optional, (graph.ops, graph.values))
    columns = stage_columns(
        builder, view, stage_of, cost=cost, runs=everywhere, retains=retains, keeps=keeps, holds=holds
    )
    held = add_residency(builder, columns, view, stage_of)
    add_exclusive(builder, columns, view)
    add_each_runs(builder, columns, pinned)
    add_consumed(builder, columns, graph)
    add_staying(builder, columns, kept)
    memory = add_memory(builder, columns, view, stage_of, held)
    program = builder.program()

    def complete(matrices: Matrices) -> Floats:
        stage, op = np.nonzero(matrices.computed[:, view.maker[kept]])
        retained = matrices.retained.copy()
        for at, which in zip(stage.tolist(), np.flatnonzero(kept)[op].tolist(), strict=True):
            retained[at + 1 :, which] = True
        full = Matrices(matrices.computed, retained, matrices.made)
        present = (held.column, residents(view, full))
        return memory.filled(filled(columns, full, program.columns, present))

    return OrderFormulation(view, stages(graph.ops), program, columns.compute, columns.retain, complete, unit_ns, whole)


def add_each_runs(builder: Builder, columns: Columns, pinned: Booleans) -> None:
    """Σ over the stages of R[s,i] ≥ 1, and = 1 for ops that run exactly once; in place of (1d)."""
    stages_, ops = columns.compute.shape
    row = np.broadcast_to(np.arange(ops), (stages_, ops))
    builder.add_rows(ops, [Term(row, columns.compute)], lower=1.0, upper=np.where(pinned, 1.0, INFINITY))


def add_consumed(builder: Builder, columns: Columns, graph: Graph) -> None:
    """R[s,j] + R[s′,c] over the stages s′ before s ≤ 1 for readers j of what c consumes: c is behind j in a stage."""
    for value in graph.consumes:
        *readers, consumer = graph.users[value]
        for reader in readers:
            for stage in range(1, graph.ops):
                terms = [Term(0, columns.compute[stage, [reader]]), Term(0, columns.compute[:stage, consumer])]
                builder.add_rows(1, terms, upper=1.0)


def add_staying(builder: Builder, columns: Columns, kept: Booleans) -> None:
    """S[s+1,v] ≥ MADE[s,v] + S[s,v] for values that stay to the end once made; after the last stage all do."""
    for now, made, after in zip(columns.retain, columns.made, columns.retain[1:], strict=False):
        each = np.arange(int(kept.sum()))
        terms = [Term(each, after[kept]), Term(each, made[kept], -1.0), Term(each, now[kept], -1.0)]
        builder.add_rows(len(each), terms, lower=0.0)


def reordered(problem: Problem, sequence: Sequence[int]) -> tuple[Problem, Plan, tuple[int, ...]]:
    """The problem with its ops in the order of their first computations in `sequence`, and the sequence as its plan.

    Returns:
        The other problem, the least-memory plan there, and the order: [ops] the original op at each place. The pass
        border is left out: it means nothing in another order.
    """
    graph = problem.graph
    order = tuple(dict.fromkeys(sequence))
    place = {op: at for at, op in enumerate(order)}
    values = [value for op in order for value in graph.op_values[op]]
    name = {value: at for at, value in enumerate(values)}
    other = Graph(
        op_cost_ns=tuple(graph.op_cost_ns[op] for op in order),
        op_inputs=tuple(tuple(sorted(name[value] for value in graph.op_inputs[op])) for op in order),
        value_op=tuple(place[graph.value_op[value]] for value in values),
        value_bytes=tuple(graph.value_bytes[value] for value in values),
        op_workspace_bytes=tuple(graph.op_workspace_bytes[op] for op in order),
        optional=tuple(sorted(name[value] for value in graph.optional)),
        once=tuple(sorted(place[op] for op in graph.once)),
        keep=tuple(sorted(name[value] for value in graph.keep)),
        consumes=tuple(sorted(name[value] for value in graph.consumes)),
        fixed_bytes=graph.fixed_bytes,
    )
    return Problem(other, problem.budget_bytes), plan_of(other, [place[op] for op in sequence]), order
