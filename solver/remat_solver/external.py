"""Programs for an engine that is not installed here: a model file goes out, its solution comes back as a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from remat_ir import Answer, Graph, InvalidData, InvalidPlan, Problem, plan_of, readable, verify
from remat_ir.read import integers

from .array_view import ArrayView, Ids, trace, view_of
from .backends.engine import free_memory
from .bounds import least_need
from .formulate.formulation import engine_bytes, entries
from .interchange import FORMATS, read_solution
from .methods import method_named
from .methods.heuristics import StagedOptions
from .methods.milp import ONCE_A_STAGE, MilpOptions, formulation_of, program_entries
from .program import Floats, Program
from .search.local import polish
from .staged.relaxation import primal_heuristic
from .staged.rows import Rows, write
from .staged.scale import scale_of

METHODS = ("milp", "milp-tight", "milp-forward", "staged")
_MOVES = 65536
"""Of the local search from a solution of the staged relaxation: about a second."""
_FRACTION = 1e-3
"""How far from 0 or 1 an engine may leave a binary variable: ten times the usual integrality tolerance at most."""


def export_model(
    problem: Problem, form: str, *, method: str = "milp", options: Mapping[str, object] | None = None
) -> str:
    """The program that a method solves, as the text of a model file.

    Columns are R_t_k (op k runs in stage t), S_t_v (value v is resident when stage t begins) and C… for the rest.

    The program of "staged" is a relaxation: its optimum, and any bound on it, is a bound for every plan. Its stages are
    the coarse ones of `remat_solver.staged.relaxation`, and R is of recomputations alone. `cuts`, an option besides the
    method's, lists the ops that end them, ascending; without it every stage is told apart in which memory is short.

    Args:
        form: "mps" or "lp".
        method: "milp", "milp-tight", "milp-forward" or "staged".
        options: the method's own, and `cuts`.

    Raises:
        InvalidData: an unknown form, method or option; no graph; a program too large for the memory here.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]])
    >>> print(export_model(Problem(graph, 3), "lp").splitlines()[0])
    \\ remat milp, 3 ops, budget 3 bytes; one unit of the objective is 1.0 ns
    """
    if form not in FORMATS:
        raise InvalidData(f"the format of a program is one of {', '.join(FORMATS)}, not {form!r}", "/format")
    model = _model(problem, method, options)
    about = f"remat {method}, {problem.graph.ops} ops, budget {problem.budget_bytes} bytes; "
    about += f"one unit of the objective is {model.unit_ns!r} ns"
    return FORMATS[form](model.program, model.names, [about])


def import_solution(
    problem: Problem, text: str, *, method: str = "milp", options: Mapping[str, object] | None = None
) -> Answer:
    """The plan of a solution that another engine found for the program of `export_model`, replayed on the problem.

    What the engine says of optimality is no proof, so the answer's bound is each op once. A solution of "staged" may
    break the memory inside its stages; then the local search goes on from it.

    Args:
        text: a solution file: HiGHS, CBC, CPLEX, or a name and a number on each line as Gurobi and SCIP write.
        method: that of the export.
        options: those of the export.

    Raises:
        InvalidData: no solution in the text, one of another program, one with fractions, or one whose plan breaks the
            budget by more than the engine's tolerance can explain; the message says which.
    """
    model = _model(problem, method, options)
    found = read_solution(text, model.names)
    program = model.program
    away = np.where(program.integer, np.abs(found.x - np.round(found.x)), 0.0)
    if away.max(initial=0.0) > _FRACTION:
        worst = int(np.argmax(away))
        name = model.names[worst]
        raise InvalidData(f"the solution has {name} = {found.x[worst]:.6g}: a relaxation's, where 0 or 1 is needed")
    try:
        plan = plan_of(problem.graph, model.sequence(found.x))
        peak = verify(Problem(problem.graph, 2**53), plan).peak_bytes
    except InvalidPlan as error:
        raise InvalidData(f"the solution is no plan of this problem: {error}") from None
    if peak > problem.budget_bytes:
        raise InvalidData(
            f"the plan of the solution peaks at {readable(peak)}, {readable(peak - problem.budget_bytes)} over the "
            f"budget of {readable(problem.budget_bytes)}; export with a budget that much smaller, or with tighter "
            "tolerances of the engine"
        )
    return Answer.of_plan(problem, plan, method=method, message=f"Imported solution: {found.said or 'no status'}.")


class _Model(NamedTuple):
    """A program, what its columns are called, and the ops that a solution runs, in order."""

    program: Program
    names: list[str]
    unit_ns: float
    sequence: Callable[[Floats], Sequence[int]]


def _named(program: Program, runs: Ids, holds: Ids) -> list[str]:
    """[columns] R_t_k, S_t_v, and C… for the columns that a plan is not read from; tables of columns by stage."""
    names = [f"C{column}" for column in range(program.columns)]
    for letter, columns in (("R", runs), ("S", holds)):
        for stage, index in np.argwhere(columns >= 0).tolist():
            names[columns[stage, index]] = f"{letter}_{stage}_{index}"
    return names


def _model(problem: Problem, method: str, options: Mapping[str, object] | None) -> _Model:
    if method not in METHODS:
        raise InvalidData(f"method must be one of {', '.join(METHODS)} for a model file, not {method!r}", "/method")
    if not isinstance(problem.subject, Graph):
        raise InvalidData(f"a model file is of a graph, not of a {problem.kind}")
    given = dict(options or {})
    cuts = given.pop("cuts", None) if method == "staged" else None
    chosen: MilpOptions | StagedOptions = method_named(method).read_options(given)
    if method == "milp-forward" and problem.graph.backward_from is None:
        raise InvalidData("the graph does not say where its backward pass begins", "/graph/backward_from")
    if method == "milp-forward" and isinstance(chosen, MilpOptions) and chosen.recomputations != 1:
        raise InvalidData(ONCE_A_STAGE, "/options/recomputations")
    least, who = least_need(problem.graph)
    if least > problem.budget_bytes:
        raise InvalidData(
            f"no plan fits: {who} alone needs {readable(least)}; the budget is {readable(problem.budget_bytes)}"
        )
    view = view_of(problem)
    if isinstance(chosen, StagedOptions):
        count = entries(view, first=view.tight_from)
    else:
        count = program_entries(method, view, chosen.recomputations)
    need, allowed = engine_bytes(count), chosen.memory_bytes or free_memory()
    if need > allowed:
        raise InvalidData(
            f"the program would need about {readable(need)} of memory, more than the {readable(allowed)} for it"
        )
    if isinstance(chosen, StagedOptions):
        return _staged(problem, view, _cuts(view, cuts))
    made = formulation_of(method, view, chosen)
    return _Model(made.program, _named(made.program, made.compute, made.retain), made.unit_ns, made.sequence)


def _cuts(view: ArrayView, given: object) -> set[int]:
    """The ops that end coarse stages: the last one, that before the first at which memory is short, and given ones.

    Raises:
        InvalidData: they are no ascending ops.
    """
    last = view.ops - 1
    first = min(max(0, view.tight_from - 1), last)
    if given is None:
        return {*range(first, view.ops)}
    cuts = integers(given, "cuts", "/options/cuts")
    if any(b <= a for a, b in pairwise((-1, *cuts))) or max(cuts, default=0) > last:
        raise InvalidData(f"cuts must be ops from 0 to {last}, ascending", "/options/cuts")
    return {first, *cuts, last}


def _staged(problem: Problem, view: ArrayView, cuts: set[int]) -> _Model:
    """The relaxation for these cuts, with the costs of first computations in its objective."""
    scale, graph = scale_of(view), problem.graph
    written = write(view, Rows(cuts), scale)
    program, columns = replace(written.program, offset=graph.total_cost_ns / scale.cost_ns), written.columns

    def sequence(x: Floats) -> Sequence[int]:
        order = primal_heuristic(view, columns, x)
        if trace(view, order).peak <= view.capacity:
            return order
        return polish(graph, problem.budget_bytes, order, moves=_MOVES) or order

    names = _named(program, np.array(columns.runs), np.array(columns.holds))
    return _Model(program, names, float(scale.cost_ns), sequence)
