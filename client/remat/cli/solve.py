"""The commands that plan a file: `remat solve`, `verify`, `export`, `import-solution`, `sweep` and `max-batch`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from remat_ir import (
    Answer,
    AnswerVerdict,
    BatchFamily,
    Graph,
    InvalidData,
    InvalidPlan,
    Join,
    LargestBatch,
    Plan,
    Problem,
    Subject,
    budget_at,
    certified_need,
    duration,
    gap_of,
    overhead_of,
    plain_peak,
    readable,
    recomputed,
    to_node_link,
    verify,
    verify_answer,
)

from ..planning.budget import budget_bytes, bytes_of
from ..planning.check import checked
from ..planning.links import named_link
from ..planning.options import SolveOptions
from ..planning.planner import Planner
from ..planning.sources import GreedyPlanner, LocalPlanner, ServicePlanner, largest_batch, solver_door
from ..settings import settings
from . import options
from .app import (
    BAD_INPUT,
    NOTHING_FOUND,
    app,
    check_writable,
    code_of,
    read_plan_or_infeasible,
    read_subject,
    read_text,
    text_console,
    write_json,
    write_text,
)
from .show import (
    STYLES,
    answer_table,
    check_picture,
    counted,
    curve_chart,
    curve_picture,
    percent,
    progress_line,
)


def asked_planner(base_url: str | None, local: bool, options: Mapping[str, object] | None = None) -> Planner:
    """Who solves for the command line: the service if one is set, else the solver here, else the greedy plan."""
    here = settings(base_url=base_url)
    if base_url is not None and local:
        raise InvalidData("--base-url and --local exclude each other")
    if here.service_url is not None and not local:
        return ServicePlanner(here.service_url, api_key=here.api_key, options=options)
    try:
        return LocalPlanner(options=options)
    except InvalidData:
        if local:
            raise
        return GreedyPlanner()


def budget_of(subject: Subject, budget: str | None, fraction: float | None) -> int:
    """The budget in bytes that the options mean; a join without one may fill its slots.

    Raises:
        InvalidData: neither option, both, or one that is not a budget.
    """
    if budget is not None and fraction is not None:
        raise InvalidData("--budget and --budget-fraction exclude each other")
    if budget is not None:
        return budget_bytes(budget, subject)
    if fraction is not None:
        if not 0 <= fraction <= 1:
            meant = f"; write --budget {fraction:g}% for a percentage" if 1 < fraction <= 100 else ""
            raise InvalidData(f"--budget-fraction must be a finite number from 0 to 1, not {fraction:g}{meant}")
        return budget_at(subject, fraction)
    if isinstance(subject, Join):
        return subject.slots * subject.slot_bytes
    raise InvalidData("a budget is needed: --budget 4GiB or --budget 50%")


def linked(subject: Subject, link: str | None) -> Subject:
    """A subject with the link to the host that an option names; a chain gets the slower direction both ways.

    Raises:
        InvalidData: no such link, or a join, which has none.
    """
    if link is None:
        return subject
    found = named_link(link)
    if isinstance(subject, Graph):
        return subject.with_link(found)
    if isinstance(subject, Join):
        raise InvalidData("--link is for graphs and chains; a join has no link")
    slower = min(found.to_host_bytes_per_s, found.to_device_bytes_per_s)
    return replace(subject, link_bytes_per_s=slower, host_bytes=found.host_bytes)


def options_of(given: list[str] | None) -> dict[str, object] | None:
    """KEY=VALUE pairs as a method's options, if there are any; a value that is JSON is read as such."""
    found: dict[str, object] = {}
    for pair in given or []:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise InvalidData(f"--option must be KEY=VALUE, not {pair!r}")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found or None


@app.command()
def solve(
    file: options.File,
    budget: options.Budget = None,
    budget_fraction: options.Fraction = None,
    link: options.Link = None,
    method: options.Method = "auto",
    time_limit: options.Time = 60.0,
    max_gap: options.Gap = 0.001,
    steps: options.Steps = None,
    output: options.Output = None,
    option: options.OfMethod = None,
    name: options.Name = None,
    base_url: options.Url = None,
    local: options.Local = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Plan FILE inside a budget."""
    subject = linked(read_subject(file), link)
    problem = Problem(subject, budget_of(subject, budget, budget_fraction))
    planner = asked_planner(base_url, local, options_of(option))
    asking = solve_options_of(method, time_limit, max_gap, steps, name)
    check_writable(output)
    with progress_line(subject, quiet=quiet) as report:
        answer = planner.plan(problem, asking, on_progress=report)
    return given_out(checked(problem, answer), output, as_json)


def given_out(answer: Answer, output: Path | None, as_json: bool) -> int:
    """Write an answer's plan, print the answer as JSON or as a table; the exit code."""
    if output is not None and answer.plan is not None:
        write_json(output, answer.plan.to_json())
    if as_json:
        print(json.dumps(answer.to_json(), allow_nan=False))
    elif output is None or str(output) != "-":
        text_console().print(answer_table(answer))
    return code_of(answer)


@app.command(name="verify")
def verify_plan(
    file: options.File,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, or an answer that has one.")],
    budget: options.Budget = None,
    budget_fraction: options.Fraction = None,
    link: options.Link = None,
    as_json: options.Json = False,
) -> int:
    """Replay PLAN on FILE and say what it costs, or the first reason why it is wrong; or check that none fits."""
    subject = linked(read_subject(file), link)
    problem = Problem(subject, budget_of(subject, budget, budget_fraction))
    found = read_plan_or_infeasible(plan_file)
    if isinstance(found, Answer):
        return _verify_infeasible(problem, found, plan_file, as_json)
    plan, answer = found
    cost_ns, peak_bytes = (None, None) if answer is None else (answer.cost_ns, answer.peak_bytes)
    try:
        verdict = verify(problem, plan, cost_ns=cost_ns, peak_bytes=peak_bytes)
    except InvalidPlan as error:
        if as_json:
            print(json.dumps({"valid": False, "reason": str(error), "step": error.step}))
            return BAD_INPUT
        raise InvalidData(f"{plan_file}: {error}") from None
    overhead = overhead_of(verdict.cost_ns, subject.total_cost_ns)
    certificate = None if answer is None or answer.proof is None else _certificate(problem, answer, plan_file)
    proved = None if certificate is None else certificate.proved_ns
    if as_json:
        said = {"valid": True, "cost_ns": verdict.cost_ns, "peak_bytes": verdict.peak_bytes}
        said |= {} if proved is None else {"certified_bound_ns": proved}
        print(json.dumps({**said, "budget_bytes": problem.budget_bytes, "overhead": overhead}))
        return 0
    again = sum(recomputed(plan, subject.ops)) if isinstance(plan, Plan) and isinstance(subject, Graph) else None
    text = f"valid: cost {duration(verdict.cost_ns)} ({percent(overhead)} over one pass), peak "
    text += f"{readable(verdict.peak_bytes)} of {readable(problem.budget_bytes)}"
    print(text + ("" if again is None else f", {counted(again, 'recomputation')}"))
    if proved is not None:
        gap = percent(gap_of(verdict.cost_ns, proved))
        within = "" if certificate is None or certificate.restricted_ns is None else " within tags"
        print(f"certified{within}: no plan costs less than {duration(proved)}; this one is within {gap} of the best")
    return 0


def _verify_infeasible(problem: Problem, answer: Answer, file: Path, as_json: bool) -> int:
    """Check that no plan fits, as an answer says.

    Raises:
        InvalidData: its certificate is wrong, or does not show it.
    """
    verdict = _certificate(problem, answer, file)
    least = f"every plan needs at least {readable(verdict.least_budget_bytes)}"
    if not verdict.infeasible:
        said_by = certified_need(answer, verdict).claimed_by
        raise InvalidData(f"{file}: that no plan fits is claimed by {said_by}; all that is certified is that {least}")
    if as_json:
        said = {"infeasible": True, "least_budget_bytes": verdict.least_budget_bytes}
        print(json.dumps({**said, "budget_bytes": problem.budget_bytes}))
    else:
        print(f"certified: no plan fits {readable(problem.budget_bytes)}; {least}")
    return 0


def _certificate(problem: Problem, answer: Answer, file: Path) -> AnswerVerdict:
    """What an answer's certificate proves.

    Raises:
        InvalidData: the certificate is wrong; the message says why.
    """
    try:
        return verify_answer(problem, answer)
    except InvalidPlan as error:
        raise InvalidData(f"{file}: {error}") from None


def solve_options_of(
    method: str, time_limit: float, max_gap: float, steps: int | None = None, name: str | None = None
) -> SolveOptions:
    """The options of the command line, checked before anything is started.

    Raises:
        InvalidData: which one, and what it must be.
    """
    try:
        return SolveOptions(method=method, time_limit_s=time_limit, max_gap=max_gap, steps=steps, name=name)
    except InvalidData as error:
        field = error.pointer.removeprefix("/")
        flag = {"time_limit_s": "--time-limit", "max_gap": "--max-gap"}.get(field, f"--{field}")
        raise InvalidData(flag + str(error).removeprefix(field)) from None


ProgramOption = Annotated[
    str,
    typer.Option("--method", "-m", help="The method whose program it is: milp, milp-tight, milp-forward or staged."),
]


@app.command()
def export(
    file: options.File,
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORM", help="mps or lp for the program, node-link or remat-graph/1 for FILE."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Write here; - is standard output.")],
    budget: options.Budget = None,
    budget_fraction: options.Fraction = None,
    method: ProgramOption = "milp",
    option: options.OfMethod = None,
) -> int:
    """Write the program that a method solves on FILE, for another engine; or FILE itself in another graph format."""
    subject = read_subject(file)
    if not isinstance(subject, Graph):
        raise InvalidData(f"{file}: export takes graphs only")
    if form not in ("node-link", "remat-graph/1"):
        problem = Problem(subject, budget_of(subject, budget, budget_fraction))
        write_text(output, solver_door("export_model")(problem, form, method=method, options=options_of(option)))
    elif budget is not None or budget_fraction is not None or option:
        raise InvalidData(f"--format {form} writes the graph alone: it takes no budget and no options")
    else:
        write_json(output, to_node_link(subject) if form == "node-link" else subject.to_json(names=True))
    return 0


@app.command(name="import-solution")
def import_solution(
    file: options.File,
    solution: Annotated[
        Path,
        typer.Argument(metavar="SOLUTION", help="What HiGHS, CBC, CPLEX, Gurobi or SCIP wrote; - is standard input."),
    ],
    budget: options.Budget = None,
    budget_fraction: options.Fraction = None,
    method: ProgramOption = "milp",
    output: options.Output = None,
    option: options.OfMethod = None,
    as_json: options.Json = False,
) -> int:
    """Make a plan from the solution of an exported program and replay it on FILE.

    Give the budget, method and options of the export.
    """
    subject = read_subject(file)
    problem = Problem(subject, budget_of(subject, budget, budget_fraction))
    found: Answer = solver_door("import_solution")(
        problem, read_text(solution), method=method, options=options_of(option)
    )
    return given_out(checked(problem, found), output, as_json)


FORMS = "budgets such as 4GiB,6GiB,8GiB or 30%,50%,70%"


@app.command()
def sweep(
    file: options.File,
    budgets: Annotated[str | None, typer.Option("--budgets", metavar="LIST", help=FORMS)] = None,
    points: Annotated[int, typer.Option("--points", "-n", help="Solves along the curve, without --budgets.")] = 9,
    method: options.Method = "auto",
    time_limit: options.EachTime = 20.0,
    max_gap: options.Gap = 0.001,
    name: options.Name = None,
    option: options.OfMethod = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Write the curve as a picture.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the points as CSV.")] = None,
    base_url: options.Url = None,
    local: options.Local = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Plan FILE at several budgets: what each byte costs, and where no plan fits."""
    subject = read_subject(file)
    asking = solve_options_of(method, time_limit, max_gap, name=name)
    asked = None if budgets is None else budgets_of(subject, budgets)
    if points < 2:
        raise InvalidData(f"--points must be at least 2, not {points}")
    planner = asked_planner(base_url, local, options_of(option))

    def tell(answer: Answer) -> None:
        if not quiet:
            print(f"{readable(answer.budget_bytes)}: {_outcome(answer)}", file=sys.stderr, flush=True)

    check_picture(png)
    check_writable(csv_file, printed=False)
    if isinstance(planner, LocalPlanner):
        answers = solver_door("sweep")(
            subject,
            asked,
            points=points,
            options=options_of(option),
            on_answer=tell,
            method=method,
            time_limit_s=time_limit,
            max_gap=max_gap,
        )
    else:
        evenly = {budget_at(subject, Fraction(i + 1, points)) for i in range(points)}
        # largest first, because a bound at a larger budget holds at every smaller one
        budgets_bytes = sorted(asked or evenly, reverse=True)
        if isinstance(planner, ServicePlanner):
            answers = planner.sweep(subject, budgets_bytes, asking, on_answer=tell)
        else:
            answers = []
            for size in budgets_bytes:
                answers.append(planner.plan(Problem(subject, size), asking))
                tell(answers[-1])
        answers = reversed(answers)
    found = [checked(Problem(subject, answer.budget_bytes), answer) for answer in answers]
    plain = plain_peak(subject)
    if png is not None:
        curve_picture(png, found, plain)
    if csv_file is not None:
        _write_csv(csv_file, found)
    if as_json:
        print(json.dumps({"plain_peak_bytes": plain, "answers": [answer.to_json() for answer in found]}))
    else:
        console = text_console()
        console.print(_curve_table(found, subject, plain))
        console.print(curve_chart(found, plain, width=min(console.width, 100)))
    return 0 if any(answer.plan is not None for answer in found) else NOTHING_FOUND


@app.command(name="max-batch")
def max_batch(
    file: options.File,
    budget: Annotated[str, typer.Option("--budget", "-b", metavar="BYTES", help="Bytes, or text such as 16GiB.")],
    at_batch: Annotated[int, typer.Option("--at-batch", help="The batch at which FILE was captured.")] = 1,
    input_bytes: Annotated[
        str, typer.Option("--input-bytes", help="How many of the fixed bytes are the batch's input, at that batch.")
    ] = "0",
    all_grow: Annotated[
        bool, typer.Option("--all-grow", help="Kept values grow as well; by default gradients of parameters stay.")
    ] = False,
    method: options.Method = "auto",
    time_limit: options.EachTime = 20.0,
    total: Annotated[float, typer.Option("--total", metavar="S", help="Seconds in all.")] = 300.0,
    output: options.Output = None,
    name: options.Name = None,
    option: options.OfMethod = None,
    base_url: options.Url = None,
    local: options.Local = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Find the largest batch whose plan costs at most one more forward pass (Checkmate, equations 9 and 10)."""
    subject = read_subject(file)
    if not isinstance(subject, Graph):
        raise InvalidData(f"{file}: a batch is searched for graphs only")
    if at_batch < 1:
        raise InvalidData(f"--at-batch must be at least 1, not {at_batch}")
    if not 0 < total < float("inf"):
        raise InvalidData(f"--total must be a positive number of seconds, not {total:g}")
    values = tuple(range(subject.values)) if all_grow else None
    family = BatchFamily(subject, bytes_of(budget), at_batch, values, bytes_of(input_bytes))
    asking = solve_options_of(method, time_limit, 0.0, name=name)
    planner = asked_planner(base_url, local, options_of(option))
    check_writable(output)

    def tell(found: LargestBatch) -> None:
        if not quiet:
            print(f"batch {found.batch} reached, none above {found.bound}", file=sys.stderr, flush=True)

    if isinstance(planner, ServicePlanner):
        found = largest_batch(planner, family, asking, total_s=total, on_step=tell)
    else:
        found = solver_door("max_batch")(
            subject,
            family.budget_bytes,
            batch=at_batch,
            values=values,
            batch_bytes=family.batch_bytes,
            method=method,
            time_limit_s=time_limit,
            total_s=total,
            options=options_of(option),
            on_step=tell,
        )
    if output is not None and found.answer is not None and found.answer.plan is not None:
        write_json(output, found.answer.plan.to_json())
    if as_json:
        told = {"batch": found.batch, "bound": found.bound, "budget_bytes": family.budget_bytes}
        said = {"proved": found.proved, "claimed_by": found.claimed_by}
        print(json.dumps(told | said | {"most_cost_ns": found.most_cost_ns, "seconds": found.seconds}))
    else:
        print(_in_words(found, budget))
    return 0 if found.batch else NOTHING_FOUND


def _in_words(found: LargestBatch, budget: str) -> str:
    if not found.batch and not found.bound:
        return f"no batch trains within {budget} at the cost of one more forward pass"
    proved = "and no larger one does" if found.proved else f"and none above {found.bound} does"
    proved += ", certified" if found.claimed_by is None else f", claimed by {found.claimed_by}"
    if not found.batch:
        return f"no batch was found in time that trains within {budget} at the cost of one more forward pass, {proved}"
    return f"a batch of {found.batch} trains within {budget} at the cost of one more forward pass, {proved}"


def budgets_of(subject: Subject, text: str) -> list[int]:
    """A list of budgets: sizes, or percentages of what plain training needs beyond the fixed bytes.

    Raises:
        InvalidData: an entry that is neither.
    """
    found = {budget_bytes(word, subject) for part in text.split(",") if (word := part.strip())}
    if not found:
        raise InvalidData(f"--budgets must list {FORMS}")
    return sorted(found)


def _outcome(answer: Answer) -> str:
    if answer.overhead is None:
        return answer.status.value
    return f"{percent(answer.overhead)} over, {answer.ending}, gap {percent(answer.gap or 0.0)}"


def _curve_table(answers: Sequence[Answer], subject: Subject, plain: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("budget", "fraction", "overhead", "cost", "gap", "peak", "status"):
        table.add_column(name, justify="left" if name == "status" else "right")
    fixed = subject.fixed_bytes
    for answer in answers:
        share = (answer.budget_bytes - fixed) / max(1, plain - fixed)
        table.add_row(
            readable(answer.budget_bytes),
            f"{share:.3f}",
            "" if answer.overhead is None else percent(answer.overhead),
            "" if answer.cost_ns is None else duration(answer.cost_ns),
            "" if answer.gap is None else percent(answer.gap),
            "" if answer.peak_bytes is None else readable(answer.peak_bytes),
            answer.ending,
            style=STYLES.get(answer.status.value) if answer.plan is None else None,
        )
    return table


def _write_csv(path: Path, answers: Sequence[Answer]) -> None:
    names = ("budget_bytes", "status", "cost_ns", "bound_ns", "overhead", "gap", "peak_bytes", "seconds", "method")
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(answer.to_json() for answer in answers)
    except OSError as error:
        raise InvalidData(f"{path} cannot be written: {error.strerror or error}") from None
