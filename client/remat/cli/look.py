"""`remat show` and `remat explain`: what a plan does to memory, and what it computes again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from remat_ir import (
    AnyPlan,
    Chain,
    Compute,
    Graph,
    InvalidData,
    InvalidPlan,
    Plan,
    Subject,
    duration,
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
from ..planning.summary import journeys, journeys_text, memory_curve, moved, plain_curve, resident
from . import options
from .app import app, read_plan_file, read_subject
from .show import check_picture, counted, memory_chart, memory_picture, percent

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
    console = Console()
    console.print(memory_chart(curve, line, width=min(console.width, 110)), highlight=False)
    console.print(
        f"peak {readable(max(curve))}, plain {readable(max(plain))}, fixed {readable(subject.fixed_bytes)}, "
        f"{percent(overhead_of(cost, subject.total_cost_ns))} over one pass",
        highlight=False,
    )
    return 0


@app.command()
def explain(
    file: options.File,
    plan_file: PlanArgument = None,
    top: Annotated[int, typer.Option("--top", "-n", help="Rows of each table.")] = 12,
    as_json: options.Json = False,
) -> int:
    """List what is resident at the peak, and what PLAN computes again, by name where FILE has names."""
    subject = read_subject(file)
    graph = _graph_of(subject, file)
    plan, _ = (None, None) if plan_file is None else read_plan_file(plan_file)
    if isinstance(subject, Chain) and plan is not None:
        plan = lifted_plan(subject, plan)  # type: ignore[arg-type]
    found = explained(graph, plan if isinstance(plan, Plan) else None, str(plan_file))
    if as_json:
        print(json.dumps(found))
        return 0
    console = Console()
    console.print(
        f"{graph.ops} ops, {graph.values} values; plain peak {readable(found['plain_peak_bytes'])}, "
        f"peak {readable(found['peak_bytes'])} at {found['peak_op']}",
        highlight=False,
    )
    console.print(_rows("resident at the peak", ("value of", "bytes"), found["resident"][:top], readable))
    if isinstance(plan, Plan) and found["moved"]:
        console.print(journeys_text(graph, plan, top), highlight=False, soft_wrap=True)
        console.print(f"{moved(graph, plan)}", highlight=False)
    if found["recomputed"]:
        rows = [(f"{row['op']} ×{row['times']}", row["cost_ns"]) for row in found["recomputed"]]
        console.print(_rows("computed again", ("op", "extra cost"), rows[:top], duration))
        times, ops = sum(row["times"] for row in found["recomputed"]), len(found["recomputed"])
        console.print(
            f"{counted(times, 'recomputation')} of {counted(ops, 'op')}, {percent(found['overhead'])} over one pass",
            highlight=False,
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


def _graph_of(subject: Subject, file: Path) -> Graph:
    if isinstance(subject, Graph):
        return subject
    if isinstance(subject, Chain):
        return subject.to_graph()
    raise InvalidData(f"{file}: explain takes graphs and chains")


def _rows(title: str, heads: tuple[str, str], rows: Any, as_text: Any) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(heads[0])
    table.add_column(heads[1], justify="right")
    for name, number in rows:
        table.add_row(name, as_text(number))
    return table
