"""Programs for an engine that is not installed here: a model file goes out, its solution comes back as a plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from remat_ir import Answer, Graph, InvalidData, InvalidPlan, Problem, readable, verify

from .array_view import view_of
from .backends.engine import free_memory
from .bounds import least_need
from .formulate.formulation import Formulation, engine_bytes
from .interchange import FORMATS, read_solution
from .methods import method_named
from .methods.milp import MilpOptions, formulation_of, program_entries

METHODS = ("milp", "milp-tight", "milp-forward")
_FRACTION = 1e-3
"""How far from 0 or 1 an engine may leave a binary variable: ten times the usual integrality tolerance at most."""


def export_model(
    problem: Problem, form: str, *, method: str = "milp", options: Mapping[str, object] | None = None
) -> str:
    """The program that a method solves, as the text of a model file.

    Columns are R_t_k (op k runs in stage t), S_t_v (value v is resident when stage t begins) and C… for the rest.

    Args:
        form: "mps" or "lp".
        method: "milp", "milp-tight" or "milp-forward".
        options: the method's own.

    Raises:
        InvalidData: an unknown form, method or option; no graph; a program too large for the memory here.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]])
    >>> print(export_model(Problem(graph, 3), "lp").splitlines()[0])
    \\ remat milp, 3 ops, budget 3 bytes; one unit of the objective is 1.0 ns
    """
    if form not in FORMATS:
        raise InvalidData(f"the format of a program is one of {', '.join(FORMATS)}, not {form!r}", "/format")
    formulation = _formulation(problem, method, options)
    about = f"remat {method}, {problem.graph.ops} ops, budget {problem.budget_bytes} bytes; "
    about += f"one unit of the objective is {formulation.unit_ns!r} ns"
    return FORMATS[form](formulation.program, column_names(formulation), [about])


def import_solution(
    problem: Problem, text: str, *, method: str = "milp", options: Mapping[str, object] | None = None
) -> Answer:
    """The plan of a solution that another engine found for the program of `export_model`, replayed on the problem.

    What the engine says of optimality is no proof, so the answer's bound is each op once.

    Args:
        text: a solution file: HiGHS, CBC, CPLEX, or a name and a number on each line as Gurobi and SCIP write.
        method: that of the export.
        options: those of the export.

    Raises:
        InvalidData: no solution in the text, one of another program, one with fractions, or one whose plan breaks the
            budget by more than the engine's tolerance can explain; the message says which.
    """
    formulation = _formulation(problem, method, options)
    found = read_solution(text, column_names(formulation))
    program = formulation.program
    away = np.where(program.integer, np.abs(found.x - np.round(found.x)), 0.0)
    worst = int(np.argmax(away))
    if away[worst] > _FRACTION:
        name = column_names(formulation)[worst]
        raise InvalidData(f"the solution has {name} = {found.x[worst]:.6g}: a relaxation's, where 0 or 1 is needed")
    try:
        plan = formulation.plan(found.x)
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


def column_names(formulation: Formulation) -> list[str]:
    """[columns] R_t_k, S_t_v, and C… for the columns that a plan is not read from."""
    names = [f"C{column}" for column in range(formulation.program.columns)]
    for letter, columns in (("R", formulation.compute), ("S", formulation.retain)):
        for stage, index in np.argwhere(columns >= 0).tolist():
            names[columns[stage, index]] = f"{letter}_{stage}_{index}"
    return names


def _formulation(problem: Problem, method: str, options: Mapping[str, object] | None) -> Formulation:
    if method not in METHODS:
        raise InvalidData(f"method must be one of {', '.join(METHODS)} for a model file, not {method!r}", "/method")
    if not isinstance(problem.subject, Graph):
        raise InvalidData(f"a model file is of a graph, not of a {problem.kind}")
    chosen: MilpOptions = method_named(method).read_options(options)
    if method == "milp-forward" and problem.graph.backward_from is None:
        raise InvalidData("the graph does not say where its backward pass begins", "/graph/backward_from")
    least, who = least_need(problem.graph)
    if least > problem.budget_bytes:
        raise InvalidData(
            f"no plan fits: {who} alone needs {readable(least)}; the budget is {readable(problem.budget_bytes)}"
        )
    view = view_of(problem)
    need, allowed = engine_bytes(program_entries(view, chosen)), chosen.memory_bytes or free_memory()
    if need > allowed:
        raise InvalidData(
            f"the program would need about {readable(need)} of memory, more than the {readable(allowed)} for it"
        )
    return formulation_of(method, view, chosen)
