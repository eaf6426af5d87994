"""`remat fit` and `remat compare`: whether a model trains on a device, and what other ways would make of its step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from remat_ir import Answer, Graph, InvalidData, Plan, Problem, overhead_of, plain_peak, plain_plan, readable, verify

from ..planning.check import checked
from ..planning.checkpoints import per_block, selective
from ..planning.options import SolveOptions, with_name
from ..planning.planner import Planner
from ..target.devices import target_of
from . import options
from .app import NOTHING_FOUND, app, read_subject
from .model import EXAMPLE, captured, phases, target
from .show import check_picture, curve_chart, curve_picture, percent, ranks_picture, ways_picture
from .solve import asked_planner, budget_of, options_of, solve_options_of

PEERS: dict[str, Callable[[Graph], Plan]] = {
    "plain": plain_plan,
    "checkpoint each block": per_block,
    "selective checkpoints": selective,
}

METHODS = "auto,greedy,chen-sqrt,ap-sqrt,linearized-greedy,lp-rounding"


@app.command(
    help="Find out whether MODEL trains on a device: plain, by a plan, and at which batch; no device is needed."
    + EXAMPLE
)
def fit(
    model: options.Model,
    device: Annotated[str, typer.Option("--device", "-d", metavar="D", help=f"{options.DEVICES}.")],
    batch: options.Batch = None,
    optimizer: options.Optimizer = None,
    release_gradients: Annotated[
        bool, typer.Option("--release-gradients", help="Also plan with gradients released as they are made.")
    ] = False,
    parallel: Annotated[
        str | None,
        typer.Option(
            "--parallel",
            metavar="P",
            help="Plan for one rank of several: dp=8 or fsdp=8,tp=2,cp=2,ep=4; for each: pp=4,micros=8,schedule=1F1B.",
        ),
    ] = None,
    max_overhead: Annotated[
        float,
        typer.Option(
            "--max-overhead", metavar="F", show_default="1/3", help="Largest overhead of the largest batch's plan."
        ),
    ] = 1 / 3,
    time_limit: options.EachTime = 20.0,
    length: Annotated[
        int | None, typer.Option("--length", metavar="N", help="Tokens of a sequence, of a MODEL by its configuration.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="T", help="Dtype of model and inputs: bf16, fp16, fp32.")
    ] = None,
    autocast: Annotated[
        str | None, typer.Option("--autocast", metavar="T", help="As under torch.autocast to bf16 or fp16.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Overhead over memory as a picture.")
    ] = None,
    name: options.Name = None,
    base_url: options.Url = None,
    local: options.Local = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    check_picture(png)
    solve_options_of("auto", time_limit, 0.0, name=name)
    found = target("fit").predict(
        target("build").load(model, length),
        target_of(device),
        optimizer=optimizer,
        release_gradients=release_gradients,
        parallel=parallel,
        batch=batch,
        max_overhead=max_overhead,
        planner=asked_planner(base_url, local),
        time_limit_s=time_limit,
        name=name,
        dtype=dtype,
        autocast=autocast,
        phase=phases(quiet),
    )
    if png is not None:
        (_draw_ranks if hasattr(found, "ranks") else _draw_curve)(png, found)
    if as_json:
        print(json.dumps(found.figures, allow_nan=False))
    else:
        _print(found)
    return 0 if found.fits else NOTHING_FOUND


def _draw_ranks(png: Path, found: Any) -> None:
    names = {"fixed": "fixed_bytes", "least": "least_bytes", "by a plan": "planned_bytes", "plain": "plain_bytes"}
    bars = [(name, [getattr(rank, key) for rank in found.ranks]) for name, key in names.items()]
    ranks_picture(png, bars, found.memory_bytes, title=f"{found.name} on {found.target.name}: {found.ending}")


def _draw_curve(png: Path, found: Any) -> None:
    others = () if found.released is None else (("gradients released", found.released.curve),)
    title = f"{found.step.name} on {found.step.target.name}"
    curve_picture(png, found.curve, found.plain_bytes, title=title, others=others)


def _print(found: Any) -> None:
    """The table, and the curve below it."""
    console = Console()
    console.print(str(found), highlight=False, soft_wrap=True)
    if found.curve:
        console.print(f"\nshare of {readable(found.plain_bytes)}, and overhead by a plan", highlight=False)
        console.print(curve_chart(found.curve, found.plain_bytes, width=min(console.width, 100)), highlight=False)


class Way(NamedTuple):
    """One way to train a step, with what came of it; `plan` is None where there is none."""

    name: str
    ending: str
    seconds: float
    plan: Plan | None
    cost_ns: int = 0
    peak_bytes: int = 0


@app.command(
    help="Put methods and checkpoints next to each other on one step: MODEL, or a graph file with names." + EXAMPLE
)
def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL|FILE", help="SCRIPT:make_model, or a graph file.")],
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="SIZE", help="24GiB, or 50% of what plain training needs.")
    ] = None,
    budget_fraction: options.Fraction = None,
    methods: Annotated[str, typer.Option("--methods", metavar="LIST", help="Methods of the solver.")] = METHODS,
    device: options.Device = None,
    batch: options.Batch = None,
    optimizer: options.Optimizer = None,
    time_limit: options.Time = 20.0,
    max_gap: options.Gap = 0.001,
    name: options.Name = None,
    option: options.OfMethod = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Overhead over peak as a picture.")] = None,
    base_url: options.Url = None,
    local: options.Local = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    check_picture(png)
    words = [word.strip() for word in methods.split(",") if word.strip()]
    asked = [solve_options_of(method, time_limit, max_gap, name=name) for method in words]
    planner = asked_planner(base_url, local, options_of(option))
    step = None
    if Path(model).suffix == ".json" or model == "-":
        graph = read_subject(Path(model))
        if not isinstance(graph, Graph):
            raise InvalidData(f"{model}: ways to train are compared for graphs only")
    else:
        step = captured(model, device, batch, optimizer, base_url, quiet)
        graph = step.graph
        asked = [with_name(asking, step.call_name) for asking in asked]
    problem = Problem(graph, budget_of(graph, budget, budget_fraction))
    ways = [_peer(name, make, problem) for name, make in PEERS.items()]
    ways += [_solved(planner, problem, asking) for asking in asked]
    rows = [_row(way, problem, step) for way in ways]
    if png is not None:
        drawn = [(w.name, w.peak_bytes, overhead_of(w.cost_ns, graph.total_cost_ns)) for w in ways if w.plan]
        ways_picture(png, drawn, problem.budget_bytes, title=model)
    if as_json:
        print(json.dumps({"budget_bytes": problem.budget_bytes, "ways": rows}, allow_nan=False))
    else:
        console = Console()
        console.print(_table(rows, plain_peak(graph), problem.budget_bytes))
        for row in rows:
            if row["overhead"] is None:
                console.print(f"{row['way']}: {row['ending']}", highlight=False, soft_wrap=True)
    return 0


def _peer(name: str, make: Callable[[Graph], Plan], problem: Problem) -> Way:
    """A way that keeps to no budget."""
    start = time.perf_counter()
    try:
        plan = make(problem.graph)
    except InvalidData as error:
        return Way(name, str(error), time.perf_counter() - start, None)
    cost, peak = verify(Problem(problem.graph, 2**53), plan)
    ending = "fits" if peak <= problem.budget_bytes else "over the budget"
    return Way(name, ending, time.perf_counter() - start, plan, cost, peak)


def _solved(planner: Planner, problem: Problem, asking: SolveOptions) -> Way:
    start = time.perf_counter()
    try:
        answer: Answer = checked(problem, planner.plan(problem, asking))
    except InvalidData as error:
        return Way(asking.method, str(error), time.perf_counter() - start, None)
    seconds = time.perf_counter() - start
    if not isinstance(answer.plan, Plan):
        return Way(asking.method, answer.message or answer.ending, seconds, None)
    return Way(asking.method, answer.ending, seconds, answer.plan, answer.cost_ns or 0, answer.peak_bytes or 0)


def _row(way: Way, problem: Problem, step: Any) -> dict[str, Any]:
    overhead = None if way.plan is None else overhead_of(way.cost_ns, problem.subject.total_cost_ns)
    ends = None if step is None or way.plan is None else step.overhead_range(way.plan)
    return {
        "way": way.name,
        "overhead": overhead,
        "overhead_range": None if ends is None else list(ends),
        "peak_bytes": way.peak_bytes or None,
        "seconds": round(way.seconds, 3),
        "ending": way.ending,
    }


def _table(rows: list[dict[str, Any]], plain: int, budget: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"budget {readable(budget)}", title_justify="left")
    for name in ("way", "time", "± 20 %", "peak", "of plain", "solved in", ""):
        table.add_column(name, justify="left" if name in ("way", "") else "right")
    for row in rows:
        if row["overhead"] is None:
            table.add_row(row["way"], "", "", "", "", f"{row['seconds']:.1f} s", "no plan", style="dim")
            continue
        ends = row["overhead_range"]
        table.add_row(
            row["way"],
            f"+{percent(row['overhead'])}",
            "" if ends is None else f"{percent(ends[0])} to {percent(ends[1])}",
            readable(row["peak_bytes"]),
            f"{100 * row['peak_bytes'] / plain:.0f} %",
            f"{row['seconds']:.1f} s",
            row["ending"],
        )
    return table
