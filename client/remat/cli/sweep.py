"""`remat sweep` and `remat max-batch`: the trade-off curve of a step, and the largest batch that a budget holds."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from remat_ir import (
    Answer,
    BatchFamily,
    Graph,
    InvalidData,
    LargestBatch,
    Problem,
    Subject,
    budget_at,
    duration,
    plain_peak,
    readable,
)

from ..planning.budget import budget_bytes, bytes_of
from ..planning.check import checked
from ..planning.options import SolveOptions
from ..planning.planner import Planner
from ..planning.sources import LocalPlanner, ServicePlanner, largest_batch, solver_door
from . import options
from .app import NOTHING_FOUND, app, check_writable, read_subject, write_json
from .show import STYLES, check_picture, curve_chart, curve_picture, percent
from .solve import asked_planner, options_of, solve_options_of

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
    check_writable(csv_file)
    if isinstance(planner, LocalPlanner):
        answers = solver_door("sweep")(
            subject,
            asked,
            points=points,
            options=options_of(option) or None,
            on_answer=tell,
            method=method,
            time_limit_s=time_limit,
            max_gap=max_gap,
        )
    else:
        evenly = {budget_at(subject, Fraction(i + 1, points)) for i in range(points)}
        # largest first, because a bound at a larger budget holds at every smaller one
        budgets_bytes = sorted(asked or evenly, reverse=True)
        ask = planner.sweep if isinstance(planner, ServicePlanner) else partial(_one_by_one, planner)
        answers = reversed(ask(subject, budgets_bytes, asking, on_answer=tell))
    found = [checked(Problem(subject, answer.budget_bytes), answer) for answer in answers]
    if png is not None:
        curve_picture(png, found, plain_peak(subject))
    if csv_file is not None:
        _write_csv(csv_file, found)
    _print_curve(found, subject, as_json)
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
    family = _family(file, budget, at_batch, input_bytes, all_grow)
    asking = solve_options_of(method, time_limit, 0.0, name=name)
    planner = asked_planner(base_url, local, options_of(option))

    def tell(found: LargestBatch) -> None:
        if not quiet:
            print(f"batch {found.batch} reached, none above {found.bound}", file=sys.stderr, flush=True)

    if isinstance(planner, ServicePlanner):
        found = largest_batch(planner, family, asking, total_s=total, on_step=tell)
    else:
        found = solver_door("max_batch")(
            family.graph,
            family.budget_bytes,
            batch=at_batch,
            values=family.values,
            batch_bytes=family.batch_bytes,
            method=method,
            time_limit_s=time_limit,
            total_s=total,
            options=options_of(option) or None,
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


def _family(file: Path, budget: str, at_batch: int, input_bytes: str, all_grow: bool) -> BatchFamily:
    subject = read_subject(file)
    if not isinstance(subject, Graph):
        raise InvalidData(f"{file}: a batch is searched for graphs only")
    if at_batch < 1:
        raise InvalidData(f"--at-batch must be at least 1, not {at_batch}")
    values = tuple(range(subject.values)) if all_grow else None
    return BatchFamily(subject, bytes_of(budget), at_batch, values, bytes_of(input_bytes))


def _in_words(found: LargestBatch, budget: str) -> str:
    if not found.batch and not found.bound:
        return f"no batch trains within {budget} at the cost of one more forward pass"
    proved = "and no larger one does" if found.proved else f"and none above {found.bound} does"
    proved += ", certified" if found.claimed_by is None else f", claimed by {found.claimed_by}"
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


def _one_by_one(
    planner: Planner,
    subject: Subject,
    budgets: Sequence[int],
    asking: SolveOptions,
    *,
    on_answer: Callable[[Answer], None],
) -> list[Answer]:
    answers = []
    for budget in budgets:
        answers.append(planner.plan(Problem(subject, budget), asking))
        on_answer(answers[-1])
    return answers


def _outcome(answer: Answer) -> str:
    if answer.overhead is None:
        return answer.status.value
    return f"{percent(answer.overhead)} over, {answer.ending}, gap {percent(answer.gap or 0.0)}"


def _print_curve(answers: Sequence[Answer], subject: Subject, as_json: bool) -> None:
    plain = plain_peak(subject)
    if as_json:
        print(json.dumps({"plain_peak_bytes": plain, "answers": [answer.to_json() for answer in answers]}))
        return
    console = Console()
    console.print(_curve_table(answers, subject))
    console.print(curve_chart(answers, plain, width=min(console.width, 100)), highlight=False)


def _curve_table(answers: Sequence[Answer], subject: Subject) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("budget", "fraction", "overhead", "cost", "gap", "peak", "status"):
        table.add_column(name, justify="left" if name == "status" else "right")
    plain, fixed = plain_peak(subject), subject.fixed_bytes
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
