"""The stage program in which the solver chooses the op order too (Checkmate, Section 4.3), for small graphs.

There are as many stages as ops. Any op may run in any stage, in index order within it, and each runs at least once: for
a graph with one last op that is the paper's R[n,n] = 1 in place of (1d). The fixed order with one recomputation per op
and stage is a part of this space, so a bound proved here holds there too.

A plan of another order is no plan of the problem, whose order keeps random numbers, mutations and collectives in their
places. It is one of the same ops in another order: `reordered` makes that problem, on which the verifier can replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from remat_ir import Graph, Plan, Problem, plan_of
from remat_ir.plan import without_unread
from remat_ir.working_set import pinned_ops

from ..array_view import view_of
from ..deadline import look, never
from ..program import INFINITY, Booleans, Builder, Floats, Term
from .columns import (
    Columns,
    add_keeping_needs_computing,
    filled,
    stage_columns,
)
from .formulation import Formulation, cost_units
from .memory import add_memory
from .residency import (
    add_residency_chain,
    add_retention_of_residents,
    add_start_of_residency,
    add_uses_of_residency,
    residency_columns,
    residents,
)
from .schedule import Matrices, Stages, matrices_of, stages
from .tight import add_exclusive


class OrderFormulation(Formulation):
    """The program over stages without a frontier."""

    def sequence(self, x: Floats) -> tuple[int, ...]:
        """The ops that a solution runs, in order; the first computations may be in any order."""
        rows, ops = np.nonzero(x[self.compute] > 0.5)
        return without_unread(self.view.graph, ops[np.argsort(rows, kind="stable")].tolist())

    def start(self, sequence: Sequence[int], stop: Callable[[], bool] = never) -> Floats | None:
        """[columns] the solution of a plan in the graph's own order, or None if the space does not hold it.

        Raises:
            TimeUp: `stop` said so.
        """
        look(stop)
        matrices = matrices_of(self.view, stages(self.view.ops), sequence)
        if matrices is None:
            return None
        look(stop)
        x = self.complete(matrices)
        look(stop)
        return x if self.program.violation(x) <= 1e-6 else None


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
    held = residency_columns(builder, columns, view, stage_of)
    add_uses_of_residency(builder, columns, view, held)
    add_start_of_residency(builder, columns, view, held)
    add_residency_chain(builder, view, held)
    add_retention_of_residents(builder, columns, view, held)
    add_keeping_needs_computing(builder, columns, view)
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
        x = filled(columns, view, full, program.columns)
        present = residents(view, full)
        x[held.column[held.column >= 0]] = present[held.column >= 0]
        memory.fill(x)
        return x

    return OrderFormulation(view, stage_of, program, columns.compute, columns.retain, complete, unit_ns, whole)


def add_each_runs(builder: Builder, columns: Columns, pinned: Booleans) -> None:
    """Σ over the stages of R[s,i] ≥ 1, and = 1 for ops that run exactly once; in place of (1d)."""
    stages_, ops = columns.compute.shape
    row = np.broadcast_to(np.arange(ops), (stages_, ops))
    builder.add_rows(ops, [Term(row, columns.compute)], lower=np.ones(ops), upper=np.where(pinned, 1.0, INFINITY))


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
    for stage in range(len(columns.compute)):
        value = np.flatnonzero(kept)
        each = np.arange(len(value))
        terms = [Term(each, columns.retain[stage + 1, value]), Term(each, columns.made[stage, value], -1.0)]
        if stage:
            terms.append(Term(each, columns.retain[stage, value], -1.0))
        builder.add_rows(len(value), terms, lower=np.zeros(len(value)))


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
