"""POET's program (Patil et al., ICML 2022): Checkmate's, with a second memory to which values are paged.

Its matrices are R and S_RAM as in Checkmate, S_SD of what the second memory holds when a stage begins, and M_in and
M_out of what is paged in and out during a stage:

    S_RAM[t+1] ≤ R[t] + S_RAM[t] + M_in[t]        M_in[t]  ≤ S_SD[t]
    S_SD[t+1]  ≤ S_SD[t] + M_out[t] − M_in[t]     M_out[t] ≤ S_RAM[t]

The paper minimizes energy within a limit on time. These graphs have no energies, so that it is the time of all
computations and copies, one after the other, that is least here, without a limit. Two things follow from what a plan
can say here, and are no part of the paper: a copy is gone once it is paged in (−M_in above), and a value on the host is
not computed there (R[t] + S_SD[t] ≤ 1). The copies of a solution are then placed next to the computations by this
project's placement, so that a plan takes no longer than the program says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from benchmarks.rematbench import Unanswered
from remat_ir import InvalidPlan, Plan, Problem
from remat_solver.array_view import ArrayView, Ids, view_of
from remat_solver.backends.engine import Engine
from remat_solver.deadline import Deadline
from remat_solver.formulate.checkmate import add_dependencies, add_free, add_memory
from remat_solver.formulate.formulation import cost_units, recomputable, sequence_of, stages
from remat_solver.formulate.rows import add_keeping_needs_computing, stage_columns
from remat_solver.placement import place, timetable
from remat_solver.program import Booleans, Builder, Floats, Program, Term


@dataclass(frozen=True, eq=False)
class Written:
    """The program of a problem.

    Attributes:
        compute, page_in: [stages, ops] and [stages, values] the columns of R and M_in, −1 where there is none.
        unit_ns: ns of a unit of its objective.
    """

    problem: Problem
    view: ArrayView
    program: Program
    compute: Ids
    page_in: Ids
    unit_ns: float

    def plan(self, x: Floats) -> Plan:
        """The plan of a solution: its computations, and its copies placed next to them.

        Raises:
            InvalidPlan: the copies do not fit, by an engine's tolerance.
        """
        computed, paged = (np.where(at >= 0, x[at] > 0.5, False) for at in (self.compute, self.page_in))
        table = timetable(self.view.graph, sequence_of(self.view, stages(self.view.ops), computed))
        stage = _stages(table.order)
        moved = [gap for gap in table.gaps if paged[stage[gap.last] : stage[gap.next], gap.value].any()]
        return place(table, self.problem.budget_bytes, moved).plan


def _stages(order: Sequence[int]) -> list[int]:
    """[positions] the stage of each: how many ops were computed for the first time before it."""
    return [last + 1 for last in accumulate(order, max, initial=-1)][:-1]


def written(problem: Problem) -> Written:
    """The program of a graph with a link."""
    graph, link = problem.graph, problem.graph.link
    assert link is not None
    view, builder, stage_of = view_of(problem), Builder(), stages(graph.ops)
    cost, unit_ns, _ = cost_units(view)
    runs = recomputable(view, stage_of)
    earlier = (view.maker < stage_of.frontier[:, None]) & ~view.kept
    retains = np.vstack((earlier, np.zeros((1, view.values), dtype=np.bool_)))
    columns = stage_columns(
        builder, view, stage_of, cost=cost, runs=runs, retains=retains, keeps=runs[:, view.maker] & view.optional
    )
    held = earlier & (view.size > 0)
    size = [int(bytes_) for bytes_ in view.size]
    out_cost = np.array([link.to_host_ns(each) for each in size]) / unit_ns
    back_cost = np.array([link.to_device_ns(each) for each in size]) / unit_ns
    on_host = builder.variables_at(held)
    page_out = builder.variables_at(held, cost=out_cost[np.nonzero(held)[1]])
    back = held & retains[1:]
    page_in = builder.variables_at(back, cost=back_cost[np.nonzero(back)[1]])

    add_dependencies(builder, columns, view)

    def add(upper: float, where: Booleans, *terms: tuple[Ids, float]) -> None:
        """For each stage and value that is marked: the sum of these columns is at most so much."""
        at = np.nonzero(where)
        each = np.arange(len(at[0]))
        builder.add_rows(len(each), [Term(each, column[at], factor) for column, factor in terms], upper=upper)

    after, host_after, computed = columns.retain[1:], on_host[1:], columns.compute[:, view.maker]
    add(0.0, after >= 0, (after, 1.0), (columns.made, -1.0), (columns.retain, -1.0), (page_in, -1.0))
    add(0.0, host_after >= 0, (host_after, 1.0), (page_in, 1.0), (on_host, -1.0), (page_out, -1.0))
    for paged, source in ((page_in, on_host), (page_out, columns.retain)):
        add(0.0, paged >= 0, (paged, 1.0), (source, -1.0))
    add(1.0, (on_host >= 0) & (computed >= 0), (on_host, 1.0), (computed, 1.0))
    if link.host_bytes is not None:
        stage, value = np.nonzero(on_host >= 0)
        weight = view.size[value] / max(1, link.host_bytes)
        builder.add_rows(view.ops, [Term(stage, on_host[stage, value], weight)], upper=1.0)

    add_keeping_needs_computing(builder, columns, view)
    free, free_own = add_free(builder, columns, view)
    add_memory(builder, columns, view, stage_of, free, free_own)
    return Written(problem, view, builder.program(), columns.compute, page_in, unit_ns)


def poet(problem: Problem, seconds: float) -> Plan:
    """The method: the best plan of the program that HiGHS finds in these seconds.

    Raises:
        Unanswered: none was found, or none is in the program's space.
    """
    if problem.graph.link is None:
        raise Unanswered("no link to the host")
    program = written(problem)
    with Engine("highs") as engine:
        outcome = engine.run(program.program, deadline=Deadline(seconds))
    if outcome.x is None:
        raise Unanswered("HiGHS finds no plan in the time" if outcome.status != "infeasible" else "no plan that fits")
    try:
        return program.plan(outcome.x)
    except InvalidPlan as error:
        raise Unanswered(f"its copies do not fit: {error}") from None
