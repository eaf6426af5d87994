"""`remat show` and `remat explain`, and all else for people: tables, a progress line, charts, pictures."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from remat_ir import (
    Answer,
    AnyPlan,
    Chain,
    Compute,
    Graph,
    InvalidData,
    InvalidPlan,
    Join,
    Plan,
    Progress,
    Status,
    Subject,
    duration,
    gap_of,
    lifted_plan,
    overhead_of,
    plain_peak,
    plain_plan,
    readable,
    recomputed,
    replay,
    replay_any,
)

from ..planning.budget import budget_bytes
from ..planning.plot import figure_of
from ..planning.summary import journeys, journeys_text, memory_curve, moved, plain_curve, resident, rests_on_claim
from . import options
from .app import app, check_writable, read_plan_file, read_subject, text_console

STYLES = {
    "optimal": "bold green",
    "feasible": "green",
    "infeasible": "bold red",
    "nothing_found": "yellow",
    "cancelled": "yellow",
    "failed": "bold red",
}

EACH_LINE_S = 1.0
"""Seconds between the lines of a progress that goes to a file."""


def answer_table(answer: Answer) -> Table:
    """How a solve ended, one row for each thing that is known."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("status", Text(answer.ending, style=STYLES.get(answer.status.value, "")))
    table.add_row("method", answer.method)
    if answer.cost_ns is not None:
        table.add_row("cost", duration(answer.cost_ns))
    if answer.overhead is not None:
        table.add_row("overhead", percent(answer.overhead))
    if answer.chain_overhead is not None and answer.overhead is not None:
        text = f"persistent chain optimum {percent(answer.chain_overhead)}, this plan {percent(answer.overhead)}"
        table.add_row("baseline", text)
    if answer.bound_ns is not None:
        within = f" within {', '.join(answer.restricted_to)}" if answer.restricted_to else ""
        table.add_row("bound", duration(answer.bound_ns) + within)
        table.add_row("", _who_proves(answer))
    if answer.gap is not None:
        table.add_row("gap", percent(answer.gap))
    if answer.peak_bytes is not None:
        table.add_row("peak", readable(answer.peak_bytes))
    table.add_row("budget", readable(answer.budget_bytes))
    if answer.plan is None and answer.least_budget_bytes is not None:
        table.add_row("is enough", readable(answer.least_budget_bytes, up=True))
    if answer.plan is None and answer.least_budget_bound_bytes is not None:
        least = answer.least_budget_bound_bytes
        claimed = answer.status is Status.INFEASIBLE and answer.claimed_by
        sure = f"claimed by {answer.claimed_by}" if claimed else "certified"
        table.add_row("needed at least", f"{readable(least)}, {sure}")
    table.add_row("took", f"{answer.seconds:.2f} s" + (f", until {answer.limit}" if answer.limit else ""))
    if answer.id is not None:
        table.add_row("id", answer.id)
    if answer.cache is not None:
        table.add_row("cache", answer.cache)
    if answer.message:
        table.add_row("", answer.message)
    return table


def _who_proves(answer: Answer) -> str:
    """Whether a bound is certified, and who claims a greater one."""
    if rests_on_claim(answer):
        return f"claimed by {answer.claimed_by}"
    if answer.claimed_by is None or answer.claimed_bound_ns is None:
        return "certified"
    return f"certified; {answer.claimed_by} claims {duration(answer.claimed_bound_ns)}"


def percent(share: float) -> str:
    """A share as a percentage with four significant digits."""
    return f"{100 * share:.4g} %"


def counted(number: int, what: str) -> str:
    """A number of things, in the singular where it is one."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def progress_text(progress: Progress, total_cost_ns: int) -> str:
    """One improvement as one line: incumbent, bound and gap."""
    if progress.cost_ns is None:
        return f"{progress.seconds:6.1f} s  no plan yet"
    text = f"{progress.seconds:6.1f} s  incumbent {percent(overhead_of(progress.cost_ns, total_cost_ns))} over"
    if progress.bound_ns is not None:
        text += f"  bound {percent(overhead_of(progress.bound_ns, total_cost_ns))}"
        text += f"  gap {percent(gap_of(progress.cost_ns, progress.bound_ns))}"
    return f"{text}  {progress.source}"


@contextmanager
def progress_line(subject: Subject, *, quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """Show improvements on standard error while the block runs: one live line on a terminal, else a line at a time.

    What it yields may be called from any thread.
    """
    total = subject.total_cost_ns
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield _plain_lines(total)
        return
    spinner = Spinner("dots", Text("solving"))
    with Live(spinner, console=Console(stderr=True), refresh_per_second=8, transient=True):

        def report(progress: Progress) -> None:
            spinner.update(text=Text(progress_text(progress, total)))

        yield report


def _plain_lines(total_cost_ns: int) -> Callable[[Progress], None]:
    lock, last = threading.Lock(), [-EACH_LINE_S]

    def report(progress: Progress) -> None:
        with lock:
            if time.monotonic() - last[0] < EACH_LINE_S:
                return
            last[0] = time.monotonic()
        print(progress_text(progress, total_cost_ns), file=sys.stderr, flush=True)

    return report


BLOCKS = " ▁▂▃▄▅▆▇█"


def memory_chart(curve: Sequence[int], budget: int | None, *, width: int = 80, height: int = 12) -> str:
    """Memory over the steps as blocks of text, the budget as a line of dashes."""
    columns = _fitted(curve, max(20, width - 12))
    top = max(*columns, budget or 0, 1)
    line = None if budget is None else int((budget / top) * height - 1e-9)
    rows = []
    for row in reversed(range(height)):
        cells = ""
        for level in columns:
            eighths = round(level / top * height * 8) - row * 8
            cell = BLOCKS[max(0, min(8, eighths))]
            cells += "╌" if row == line and cell == " " else cell
        label = readable(round(top * (row + 1) / height)) if row % 4 == 3 or row == height - 1 else ""
        rows.append(f"{label:>10} {cells}")
    rows.append(f"{'':>10} {'first op':<{len(columns) // 2}}{'last op':>{len(columns) - len(columns) // 2}}")
    return "\n".join(rows)


def curve_chart(answers: Sequence[Answer], plain_bytes: int, *, width: int = 80) -> str:
    """Overhead over budget as bars of text, one line a budget; a bar beyond +100 % ends in an arrow."""
    known = [min(1.0, answer.overhead) for answer in answers if answer.overhead is not None]
    most = max(known, default=0.0) or 1.0
    lines = []
    for answer in sorted(answers, key=lambda answer: answer.budget_bytes):
        share = f"{answer.budget_bytes / max(1, plain_bytes):6.3f}"
        if answer.overhead is None:
            lines.append(f"{share} {'✗ ' + answer.status.value}")
            continue
        bar = "█" * round(min(1.0, answer.overhead) / most * (width - 24)) + ("▶" if answer.overhead > 1 else "")
        lines.append(f"{share} {bar or '▏'} {100 * answer.overhead:.3g} %")
    return "\n".join(lines)


def memory_picture(path: Path, curves: Sequence[tuple[str, Sequence[int]]], budget: int | None, *, title: str) -> None:
    """Memory over the steps as a picture: one line for each (name, bytes while each op runs), the budget dashed.

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    for name, curve in curves:
        axes.step(range(len(curve)), [size / 2**20 for size in curve], where="mid", label=name, linewidth=1.2)
    if budget is not None:
        axes.axhline(budget / 2**20, color="crimson", linestyle="--", linewidth=1, label="budget")
    axes.set(xlabel="step of the plan", ylabel="memory in MiB", title=title)
    axes.set_ylim(bottom=0)
    _save(figure, axes, path)


def curve_picture(
    path: Path,
    answers: Sequence[Answer],
    plain_bytes: int,
    *,
    title: str = "",
    others: Sequence[tuple[str, Sequence[Answer]]] = (),
) -> None:
    """Overhead over budget as a picture: plans, proved bounds, the zone where no plan fits, other curves by name.

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    solved = sorted((a for a in answers if a.overhead is not None), key=lambda answer: answer.budget_bytes)
    at = [answer.budget_bytes / 2**20 for answer in solved]
    axes.plot(at, [100 * (answer.overhead or 0) for answer in solved], "o-", label="plan")
    bounds = [
        100 * ((answer.bound_ns or 0) / (answer.cost_ns or 1) * (1 + (answer.overhead or 0)) - 1) for answer in solved
    ]
    axes.plot(at, bounds, "_", color="gray", label="proved bound", markersize=10)
    for name, curve in others:
        known = sorted((a.budget_bytes / 2**20, 100 * a.overhead) for a in curve if a.overhead is not None)
        axes.plot([size for size, _ in known], [overhead for _, overhead in known], "s--", label=name)
    bad = max((a for a in answers if a.status.value == "infeasible"), key=lambda a: a.budget_bytes, default=None)
    if bad is not None:
        sure = "certified" if bad.claimed_by is None else f"claimed by {bad.claimed_by}"
        axes.axvspan(0, bad.budget_bytes / 2**20, color="crimson", alpha=0.12, label=f"no plan fits, {sure}")
    axes.axvline(plain_bytes / 2**20, color="gray", linestyle=":", linewidth=1, label="plain peak")
    axes.set(xlabel="budget in MiB", ylabel="overhead in %", title=title)
    axes.set_xlim(left=0)
    if axes.get_ylim()[1] > 105:  # one plan for next to no memory would squash all that one might choose
        axes.set_ylim(top=105)
    _save(figure, axes, path)


def ways_picture(path: Path, ways: Sequence[tuple[str, int, float]], budget: int, *, title: str = "") -> None:
    """Ways to train one step as a picture: a point for each (name, peak in bytes, overhead as a share).

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    colors = _colors(len(ways))
    for at, (name, peak, overhead) in enumerate(ways):
        marker = MARKERS[at % len(MARKERS)]
        axes.plot([peak / 2**20], [100 * overhead], marker, color=colors[at], label=name, markersize=7)
    axes.axvline(budget / 2**20, color="crimson", linestyle="--", linewidth=1, label="budget")
    axes.set(xlabel="peak in MiB", ylabel="overhead in %", title=title)
    axes.set_xlim(left=0)
    _save(figure, axes, path)


MARKERS = "osD^vP*X<>hp8d"
"""One for each way that is compared; with as many colors no two look alike."""


def _colors(count: int) -> list[Any]:
    """Colors that can be told from each other, the dark ones of each pair first."""
    from matplotlib import colormaps

    table = [colormaps["tab20"](at) for at in range(20)]
    return [(table[::2] + table[1::2])[at % len(table)] for at in range(count)]


def ranks_picture(path: Path, bars: Sequence[tuple[str, Sequence[int | None]]], memory: int, *, title: str) -> None:
    """What each rank of a pipeline needs as a picture: bars for each (name, bytes of each rank), the memory dashed.

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    width = 0.8 / len(bars)
    for at, (name, sizes) in enumerate(bars):
        places = [rank + (at - (len(bars) - 1) / 2) * width for rank in range(len(sizes))]
        axes.bar(places, [(size or 0) / 2**20 for size in sizes], width, label=name)
    axes.axhline(memory / 2**20, color="crimson", linestyle="--", linewidth=1, label="memory")
    axes.set(xlabel="rank", ylabel="peak in MiB", title=title)
    axes.set_xticks(range(len(bars[0][1])))
    _save(figure, axes, path)


def _fitted(curve: Sequence[int], columns: int) -> list[int]:
    """The curve in at most so many columns, each the largest of what it stands for; a few ops are drawn broad."""
    if len(curve) <= columns:
        return [level for level in curve or [0] for _ in range(min(8, columns // max(1, len(curve))))]
    edges = [i * len(curve) // columns for i in range(columns + 1)]
    return [max(curve[a:b]) for a, b in pairwise(edges)]


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be written, before hours are spent on what it would show.

    Raises:
        InvalidData: matplotlib is not installed, it knows no such format, or there is no such folder.
    """
    if path is None:
        return
    check_writable(path)
    known = _figure()[0].canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InvalidData(f"{path} cannot be drawn: its name must end in one of .{', .'.join(sorted(known))}")


def _figure() -> tuple[Any, Any]:
    figure, (axes,) = figure_of(1, 4.5, ", or leave --png out")
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InvalidData(f"{path} cannot be written: {error}") from None


PlanArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[PLAN]", help="A plan, or an answer that has one; without one, plain training."),
]
BudgetLine = Annotated[str | None, typer.Option("--budget", "-b", metavar="BYTES", help="Draw this budget as a line.")]


@app.command()
def show(
    file: options.File,
    plan_file: PlanArgument = None,
    budget: BudgetLine = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="OUT", help="Write the picture here.")] = None,
    as_json: options.Json = False,
) -> int:
    """Show the memory over the steps of PLAN on FILE, next to training without recomputation."""
    check_picture(png)
    subject = read_subject(file)
    plain = plain_curve(subject)
    curve, line = plain, None if budget is None else budget_bytes(budget, subject)
    cost = subject.total_cost_ns
    if plan_file is not None:
        plan, answer = read_plan_file(plan_file)
        curve, cost = _curve(subject, plan, plan_file)
        if line is None and answer is not None:
            line = answer.budget_bytes
    if png is not None:
        curves = [("plain", plain)] + ([("plan", curve)] if plan_file is not None else [])
        memory_picture(png, curves, line, title=file.name)
    if as_json:
        data = {"memory_bytes": curve, "plain_memory_bytes": plain, "budget_bytes": line, "cost_ns": cost}
        print(json.dumps({**data, "peak_bytes": max(curve), "plain_peak_bytes": max(plain)}))
        return 0
    console = text_console()
    console.print(memory_chart(curve, line, width=min(console.width, 110)))
    console.print(
        f"peak {readable(max(curve))}, plain {readable(max(plain))}, fixed {readable(subject.fixed_bytes)}, "
        f"{percent(overhead_of(cost, subject.total_cost_ns))} over one pass"
    )
    return 0


@app.command()
def explain(
    file: options.File,
    plan_file: PlanArgument = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="Rows of each table.")] = 12,
    as_json: options.Json = False,
) -> int:
    """List what is resident at the peak, and what PLAN computes again, by name where FILE has names."""
    subject = read_subject(file)
    if isinstance(subject, Join):
        raise InvalidData(f"{file}: explain takes graphs and chains")
    graph = subject.to_graph() if isinstance(subject, Chain) else subject
    plan, _ = (None, None) if plan_file is None else read_plan_file(plan_file)
    if isinstance(subject, Chain) and plan is not None:
        plan = lifted_plan(subject, plan)  # type: ignore[arg-type]
    found = explained(graph, plan if isinstance(plan, Plan) else None, str(plan_file))
    if as_json:
        print(json.dumps(found))
        return 0
    console = text_console()
    console.print(
        f"{graph.ops} ops, {graph.values} values; plain peak {readable(found['plain_peak_bytes'])}, "
        f"peak {readable(found['peak_bytes'])} at {found['peak_op']}"
    )
    console.print(_rows("resident at the peak", ("value of", "bytes"), found["resident"][:top], readable))
    if isinstance(plan, Plan) and found["moved"]:
        console.print(journeys_text(graph, plan, top), soft_wrap=True)
        console.print(f"{moved(graph, plan)}")
    if found["recomputed"]:
        rows = [(f"{row['op']} ×{row['times']}", row["cost_ns"]) for row in found["recomputed"]]
        console.print(_rows("computed again", ("op", "extra cost"), rows[:top], duration))
        times, ops = sum(row["times"] for row in found["recomputed"]), len(found["recomputed"])
        console.print(
            f"{counted(times, 'recomputation')} of {counted(ops, 'op')}, {percent(found['overhead'])} over one pass"
        )
    return 0


def explained(graph: Graph, plan: Plan | None, name: str = "the plan") -> dict[str, Any]:
    """The peak of a plan, what is resident there, and the recomputed ops, the largest first.

    Raises:
        InvalidData: the plan is not one of the graph.
    """
    chosen = plain_plan(graph) if plan is None else plan
    try:
        moments = list(replay(graph, chosen))
    except InvalidPlan as error:
        raise InvalidData(f"{name}: {error}") from None
    peak = max(moments, key=lambda moment: moment.peak_bytes)
    there = _resident_during(graph, chosen, peak.step)
    again = recomputed(chosen, graph.ops)
    ops = [
        {"op": graph.op_label(op), "times": times, "cost_ns": times * graph.op_cost_ns[op]}
        for op, times in enumerate(again)
        if times
    ]
    return {
        "plain_peak_bytes": plain_peak(graph),
        "peak_bytes": peak.peak_bytes,
        "peak_op": graph.op_label(peak.op or 0),
        "resident": sorted(there.items(), key=lambda item: (-item[1], item[0])),
        "recomputed": sorted(ops, key=lambda row: (-int(str(row["cost_ns"])), str(row["op"]))),
        "moved": [
            {"value": j.value, "op": graph.op_label(graph.value_op[j.value]), "out_ns": j.out_ns, "back_ns": j.back_ns}
            for j in journeys(graph, chosen)
        ],
        "host_peak_bytes": max(moment.host_bytes for moment in moments),
        "overhead": overhead_of(moments[-1].cost_ns, graph.total_cost_ns),
    }


def _resident_during(graph: Graph, plan: Plan, last: int) -> Counter[str]:
    """Bytes by the op that made them, while step `last` runs."""
    found: Counter[str] = Counter()
    if graph.fixed_bytes:
        found["fixed: parameters, inputs and the like"] = graph.fixed_bytes
    for value in resident(graph, plan.steps[:last]):
        found[graph.op_label(graph.value_op[value])] += graph.value_bytes[value]
    step = plan.steps[last]
    if isinstance(step, Compute):
        made = {*graph.op_always[step.op], *(step.kept or ())}
        found[f"{graph.op_label(step.op)}, running"] += sum(graph.value_bytes[v] for v in made)
        if graph.op_workspace_bytes[step.op]:
            found[f"{graph.op_label(step.op)}, workspace"] += graph.op_workspace_bytes[step.op]
    return found


def _curve(subject: Subject, plan: AnyPlan, name: Path) -> tuple[list[int], int]:
    try:
        cost = 0
        for moment in replay_any(subject, plan):
            cost = moment.cost_ns
        return memory_curve(subject, plan), cost
    except InvalidPlan as error:
        raise InvalidData(f"{name}: {error}") from None


def _rows(title: str, heads: tuple[str, str], rows: Any, as_text: Any) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(heads[0])
    table.add_column(heads[1], justify="right")
    for name, number in rows:
        table.add_row(name, as_text(number))
    return table
