"""`remat export` and `remat import-solution`: files for other engines, and what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat_ir import Answer, Graph, InvalidData, Problem, to_node_link

from ..planning.check import checked
from ..planning.sources import solver_door
from .app import BudgetOption, FileArgument, FractionOption, JsonOption, MethodOptions, app
from .files import read_subject, read_text, write_json, write_text
from .solve import budget_of, given_out, options_of

GRAPH_FORMATS = ("node-link", "remat-graph/1")

ProgramOption = Annotated[
    str, typer.Option("--method", "-m", help="The method whose program it is: milp, milp-tight or milp-forward.")
]


@app.command()
def export(
    file: FileArgument,
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORM", help="mps or lp for the program, node-link or remat-graph/1 for FILE."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Write here; - is standard output.")],
    budget: BudgetOption = None,
    budget_fraction: FractionOption = None,
    method: ProgramOption = "milp",
    option: MethodOptions = None,
) -> int:
    """Write the program that a method solves on FILE, for another engine; or FILE itself in another graph format."""
    subject = read_subject(file)
    if not isinstance(subject, Graph):
        raise InvalidData(f"{file}: export takes graphs only")
    if form not in GRAPH_FORMATS:
        problem = Problem(subject, budget_of(subject, budget, budget_fraction))
        write_text(
            output, solver_door("export_model")(problem, form, method=method, options=options_of(option) or None)
        )
    elif budget is not None or budget_fraction is not None or option:
        raise InvalidData(f"--format {form} writes the graph alone: it takes no budget and no options")
    else:
        write_json(output, to_node_link(subject) if form == "node-link" else subject.to_json(names=True))
    return 0


@app.command(name="import-solution")
def import_solution(
    file: FileArgument,
    solution: Annotated[
        Path,
        typer.Argument(metavar="SOLUTION", help="What HiGHS, CBC, CPLEX, Gurobi or SCIP wrote; - is standard input."),
    ],
    budget: BudgetOption = None,
    budget_fraction: FractionOption = None,
    method: ProgramOption = "milp",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the plan here.")] = None,
    option: MethodOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Make a plan from the solution of an exported program and replay it on FILE.

    Give the budget, method and options of the export.
    """
    subject = read_subject(file)
    problem = Problem(subject, budget_of(subject, budget, budget_fraction))
    found: Answer = solver_door("import_solution")(
        problem, read_text(solution), method=method, options=options_of(option) or None
    )
    return given_out(checked(problem, found), output, as_json)
