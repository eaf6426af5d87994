"""The commands that take a model: `remat capture` and `remat plan`, `remat fit` and `remat compare`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from remat_ir import Answer, Graph, InvalidData, Plan, Problem, overhead_of, plain_peak, plain_plan, readable, verify

from ..planning.budget import share_sentence
from ..planning.check import checked
from ..planning.checkpoints import LOST, STACKS, Setting, best_flags, per_block, selective
from ..planning.links import named_link
from ..planning.options import SolveOptions, with_name
from ..planning.plan_file import PlannedStep, write_plan_file
from ..planning.planner import Planner, page_of, plan_or_raise, planner_for
from ..planning.summary import headline, memory_curve, memory_svg, plain_curve
from ..target.devices import target_of
from . import options
from .app import NOTHING_FOUND, app, check_writable, code_of, read_subject, text_console, write_json
from .show import (
    check_picture,
    curve_chart,
    curve_picture,
    memory_chart,
    memory_picture,
    percent,
    progress_line,
    ranks_picture,
    ways_picture,
)
from .solve import asked_planner, budget_of, options_of, solve_options_of

EXAMPLE = """

MODEL is a config.json of transformers or diffusers, a preset such as gpt2 (docs/targets.md lists them), or
SCRIPT:make_model: a Python file or the dotted name of a module, and a function in it that returns
(model, args) or (model, args, kwargs), a module and one call of it as for remat.optimize:

\b
    def make_model(batch=8):
        model = GPT2LMHeadModel(GPT2Config())
        tokens = torch.zeros(batch, 1024, dtype=torch.long)
        return model, {"input_ids": tokens, "labels": tokens}

Nothing large is allocated: tensors have shapes and no values while the function runs. With --device the step is
captured as it would be on that device and its kernels are priced by a roofline; without, they are measured here."""


def captured(
    model: str, device: str | None, batch: int | None, optimizer: str | None, base_url: str | None, quiet: bool
) -> Any:
    """The `remat.target.step.TargetStep` of what the command line names.

    Raises:
        InvalidData: torch is not installed, or the model cannot be made.
        CaptureError: it cannot be captured.
    """
    build, step = target("build"), target("step")
    phase = phases(quiet)
    table = planner_for(base_url).profiles
    if device is not None:
        target_of(device)  # before the model's imports, which take their time
    return step.target_step(build.load(model), device, batch=batch, optimizer=optimizer, table=table, phase=phase)


def phases(quiet: bool) -> Callable[[str], None]:
    """What prints a line when something is begun, with the seconds until then."""
    start = time.perf_counter()

    def phase(text: str) -> None:
        if not quiet:
            print(f"remat: {time.perf_counter() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    return phase


def target(module: str) -> Any:
    """A module of `remat.target`; by name, since it needs torch, which the other commands do not.

    Raises:
        InvalidData: torch is not installed.
    """
    try:
        return import_module(f"remat.target.{module}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InvalidData(
            "this command captures a model and needs torch; run pip install '.[torch]' in a clone of remat"
        ) from None


def told(found: Any, console: Console) -> None:
    """Print what was captured, how long it took, and where its costs are from."""
    graph = found.graph
    seconds = ", ".join(f"{name} {took:.1f} s" for name, took in found.seconds.items())
    console.print(f"{found.name}: {graph.ops} ops, {graph.values} values; {seconds}")
    console.print(f"costs: {'' if found.target else 'measured on '}{found.priced}")
    fixed = ", ".join(f"{name} {readable(size)}" for name, size in found.step.fixed.items() if size)
    console.print(f"fixed: {fixed}")


@app.command(help="Capture the training step of MODEL as a graph file, with the names of its modules." + EXAMPLE)
def capture(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The graph; - is standard output.")],
    device: options.Device = None,
    batch: options.Batch = None,
    optimizer: options.Optimizer = None,
    base_url: options.Url = None,
    quiet: options.Quiet = False,
) -> int:
    check_writable(output)
    found = captured(model, device, batch, optimizer, base_url, quiet)
    write_json(output, found.graph.to_json(names=True))
    if not quiet:
        console = text_console(stderr=str(output) == "-")
        told(found, console)
        plain = readable(plain_peak(found.graph))
        console.print(f"plain training needs {plain}; remat solve {output} --budget 50% plans it")
    return 0


@app.command(
    help="Capture MODEL, plan it inside a budget, show the memory of the step, and write the plan for remat.optimize."
    + EXAMPLE
)
def plan(
    model: options.Model,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="SIZE", help="24GiB or 50%; the device's memory without it.")
    ] = None,
    budget_fraction: options.Fraction = None,
    device: options.Device = None,
    batch: options.Batch = None,
    optimizer: options.Optimizer = None,
    link: options.Link = None,
    stack: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="STACK",
            help="Show the best recompute flags of deepspeed, hf, megatron, nemo or torchtitan.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The plan, for plan= of remat.optimize.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Memory over the step, .svg or .png.")
    ] = None,
    method: options.Method = "auto",
    time_limit: options.Time = 60.0,
    max_gap: options.Gap = 0.001,
    steps: options.Steps = None,
    option: options.OfMethod = None,
    name: options.Name = None,
    base_url: options.Url = None,
    local: options.Local = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    asking = solve_options_of(method, time_limit, max_gap, steps, name)
    planner = asked_planner(base_url, local, options_of(option))
    if stack is not None and stack not in STACKS:
        raise InvalidData(f"--for takes {', '.join(sorted(STACKS))}, not {stack!r}")
    over = None if link is None else named_link(link)  # before the capture, which takes its time
    check_writable(output, printed=False)
    if picture is not None and picture.suffix != ".svg":
        check_picture(picture)
    check_writable(picture)
    given = target_of(device) if device is not None and budget is None is budget_fraction else None
    if given is None and budget is None and budget_fraction is None:
        raise InvalidData("a budget is needed: --budget 24GiB, --budget 50%, or --device for that device's memory")
    share = budget_fraction is not None or "%" in (budget or "")
    found = captured(model, device, batch, optimizer, base_url, quiet)
    graph = found.graph if over is None else found.graph.with_link(over)
    found = replace(found, step=replace(found.step, graph=graph))
    size = given.usable_bytes if given is not None else budget_of(graph, budget, budget_fraction)
    problem = Problem(graph, size)
    start = time.perf_counter()
    with progress_line(graph, quiet=quiet) as report:
        asking = with_name(asking, found.call_name)
        answer = checked(problem, planner.plan(problem, asking, on_progress=report))
    found.seconds["solve"] = time.perf_counter() - start
    plan_or_raise(answer, graph)
    assert isinstance(answer.plan, Plan)
    if output is not None:
        write_plan_file(output, [PlannedStep(graph, answer, found.priced)])
    flags = None if stack is None else best_flags(found.graph.with_link(None), stack, size)
    curves = plain_curve(graph), memory_curve(graph, answer.plan)
    if picture is not None:
        _draw(picture, curves, size, headline(graph, answer))
    if as_json:
        print(json.dumps(_data(found, answer, flags), allow_nan=False))
        return code_of(answer)
    _show(found, answer, answer.plan, page_of(planner, answer), curves[1], size, share)
    if flags is not None and stack is not None:
        text_console().print(_flags_line(stack, flags, answer), soft_wrap=True)
    return code_of(answer)


def _flags_line(stack: str, flags: Setting, answer: Answer) -> str:
    """The best setting of a stack's flags, what it needs, and how far it is from the plan."""
    assert answer.cost_ns is not None
    more = percent(flags.cost_ns / answer.cost_ns - 1 if answer.cost_ns else 0.0)
    most = f", at most {percent(flags.cost_ns / answer.bound_ns - 1)} than any" if answer.bound_ns else ""
    lost = f" ({LOST[stack]})" if stack in LOST else ""
    return f"{stack}: {flags.flags}; {readable(flags.peak_bytes)}, {more} slower than the plan{most}{lost}"


def _show(found: Any, answer: Answer, plan: Plan, url: str | None, curve: list[int], size: int, share: bool) -> None:
    """Print what was captured, what the plan costs, how sure that is, and the memory over the step."""
    console = text_console()
    told(found, console)
    line = headline(found.graph, answer, peak_bytes=found.peak_bytes(plan), url=url)
    if share:
        console.print(share_sentence(found.graph, size), soft_wrap=True)
    console.print(line, style="bold", soft_wrap=True)
    if found.target is not None:
        size_there = readable(found.reserved_bytes(plan))
        console.print(f"{size_there} reserved by torch's allocator, the optimizer's step included")
    console.print(sure(found, plan))
    console.print(memory_chart(curve, size, width=min(console.width, 110)))


def sure(found: Any, plan: Plan) -> str:
    """How sure the overhead is, in words."""
    ends = found.overhead_range(plan)
    if ends is None:
        return "kernels were measured here, one by one"
    low, high = map(percent, ends)
    device = found.target.name
    return f"overhead {low} to {high} if each class of kernels is off by up to 20 %; nothing was timed on {device}"


def _data(found: Any, answer: Answer, flags: Setting | None) -> dict[str, Any]:
    return {
        "model": found.name,
        "ops": found.graph.ops,
        "device": None if found.target is None else found.target.name,
        "priced": found.priced,
        "seconds": dict(found.seconds),
        "fixed_bytes": dict(found.step.fixed),
        "plain_peak_bytes": found.peak_bytes(),
        "peak_bytes": found.peak_bytes(answer.plan),
        "plain_reserved_bytes": found.reserved_bytes(),
        "reserved_bytes": found.reserved_bytes(answer.plan),
        "overhead_range": found.overhead_range(answer.plan),
        "answer": answer.to_json(),
        "flags": None
        if flags is None
        else {
            "flags": flags.flags,
            "cost_ns": flags.cost_ns,
            "peak_bytes": flags.peak_bytes,
            "over_plan_ns": None if answer.cost_ns is None else flags.cost_ns - answer.cost_ns,
            "over_any_ns": None if answer.bound_ns is None else flags.cost_ns - answer.bound_ns,
        },
    }


def _draw(path: Path, curves: tuple[list[int], list[int]], budget: int, title: str) -> None:
    if path.suffix != ".svg":
        memory_picture(path, [("without a plan", curves[0]), ("plan", curves[1])], budget, title=title)
        return
    svg = memory_svg(*curves, budget).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise InvalidData(f"{path} cannot be written: {error.strerror or error}") from None


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
        console = text_console()
        console.print(str(found), soft_wrap=True)
        if found.curve:
            console.print(f"\nshare of {readable(found.plain_bytes)}, and overhead by a plan")
            console.print(curve_chart(found.curve, found.plain_bytes, width=min(console.width, 100)))
    return 0 if found.fits else NOTHING_FOUND


def _draw_ranks(png: Path, found: Any) -> None:
    names = {"fixed": "fixed_bytes", "least": "least_bytes", "by a plan": "planned_bytes", "plain": "plain_bytes"}
    bars = [(name, [getattr(rank, key) for rank in found.ranks]) for name, key in names.items()]
    ranks_picture(png, bars, found.memory_bytes, title=f"{found.name} on {found.target.name}: {found.ending}")


def _draw_curve(png: Path, found: Any) -> None:
    others = () if found.released is None else (("gradients released", found.released.curve),)
    title = f"{found.step.name} on {found.step.target.name}"
    curve_picture(png, found.curve, found.plain_bytes, title=title, others=others)


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
    model: Annotated[
        str, typer.Argument(metavar="MODEL|FILE", help="SCRIPT:make_model, a config.json, a preset, or a graph file.")
    ],
    budget: options.Budget = None,
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
    if _is_graph_file(model):
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
        console = text_console()
        console.print(_table(rows, plain_peak(graph), problem.budget_bytes))
        for row in rows:
            if row["overhead"] is None:
                console.print(f"{row['way']}: {row['ending']}", soft_wrap=True)
    return 0


def _is_graph_file(text: str) -> bool:
    """Whether a graph is meant: standard input, or a JSON file that is no configuration of a model."""
    if Path(text).suffix != ".json":
        return text == "-"
    try:
        data = json.loads(Path(text).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True  # whoever reads it as a graph says what is wrong
    known = isinstance(data, dict) and "format" not in data and ("model_type" in data or "_class_name" in data)
    return not known


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
    return {
        "way": way.name,
        "overhead": overhead,
        "overhead_range": None if step is None or way.plan is None else step.overhead_range(way.plan),
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
