"""42 plans on graphs alone: what torch's way costs over the best plan of any kind, with bounds of both spaces.

Each row has the cheapest free plan (`auto`), that plan's tags as torch carries them out, and the cheapest plan by tags
(`tags`), each with the bound that was proved: for any plan, and for plans by tags.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import read_rows
from benchmarks.harness.table import table
from benchmarks.rematbench.instances import load
from benchmarks.tags.record import RESULTS, entered
from remat_ir import InvalidPlan, Plan, Problem, plain_peak, tagged_plan, tags_of, verify
from remat_ir.restrictions import TAGS
from remat_solver import solve

GRAPHS = {
    "checkmate-fcn8-b32": (75,),
    "checkmate-segnet-b32": (75, 50),
    "checkmate-unet-b32": (75, 50),
    "checkmate-mobilenet-b1": (75, 60, 50),
    "checkmate-mobilenet-b32": (75, 50, 40, 30),
    "unet-4-whole": (75, 50, 40, 30),
    "unet-4": (75, 50, 40, 30),
    "gpt-12-whole": (75, 50, 40),
    "checkmate-resnet50-b32": (75, 50, 40, 30),
    "gpt-12": (75, 50, 40, 30),
    "resnet50-grouped": (75, 50, 40),
    "resnet-16": (75, 50, 40, 30),
    "densenet-24": (75, 50, 40, 30),
}
"""13 graphs of RematBench, and shares of the plain peak in percent: 42 plans."""
COLUMNS = ("graph", "budget", "free plan", "its bound", "its tags", "by tags", "bound by tags", "same peak")


def row_of(name: str, share: int, seconds: float) -> dict[str, Any]:
    """One row: costs over the plain step's, and bounds; None where nothing was found."""
    graph = load(name).graph
    problem = Problem(graph, plain_peak(graph) * share // 100)
    total = graph.total_cost_ns

    def over(cost: int | None) -> float | None:
        return None if cost is None else cost / total - 1

    free = solve(problem, method="auto", time_limit_s=seconds, max_gap=0.0)
    row: dict[str, Any] = {"graph": name, "share": share, "ops": graph.ops, "seconds": seconds}
    row |= {"free": over(free.cost_ns), "free_bound": over(free.bound_ns), "free_status": free.status.value}
    if isinstance(free.plan, Plan):
        try:
            cost, peak = verify(problem, tagged_plan(graph, tags_of(graph, free.plan)))
            row |= {"same": over(cost), "same_peak": peak == free.peak_bytes and cost == free.cost_ns}
        except InvalidPlan:
            row |= {"same": None, "same_peak": False}
    tags = solve(problem, method="tags", time_limit_s=seconds, max_gap=0.0)
    # a bound of any plan is one of plans by tags
    bound = max(tags.bound_ns or 0, free.bound_ns or 0)
    return row | {
        "tags": over(tags.cost_ns),
        "tags_bound": over(bound),
        "tags_bound_in_space": tags.restricted_to == (TAGS,) and bound > (free.bound_ns or 0),
        "tags_status": tags.status.value,
        "said": tags.message,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """What may be asked for."""
    parser.add_argument("--graphs", nargs="+", default=tuple(GRAPHS), choices=tuple(GRAPHS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each of two solves a row")
    parser.add_argument("--output", type=Path, default=RESULTS / "tags-graphs.jsonl")


def made(given: argparse.Namespace) -> str:
    """Make what is missing of the table."""
    rows = read_rows(given.output)
    there = {(row["graph"], row["share"]) for row in rows}
    for name in given.graphs:
        for share in GRAPHS[name]:
            if (name, share) not in there:
                rows.append(entered(given.output, row_of(name, share, given.seconds)))
                print(f"{name} at {share} %: {_percent(rows[-1]['tags'])} by tags", flush=True)
    return shown(rows)


def _percent(found: float | None) -> str:
    return "–" if found is None else f"{100 * found:.3f} %"


def shown(rows: Iterable[dict[str, Any]]) -> str:
    """The table, and how many plans torch carries out as they are."""
    cells, count, same, within = [], 0, 0, 0
    for row in rows:
        if row["free"] is None and row["tags"] is None:
            cells.append([row["graph"], f"{row['share']} %", row["free_status"], *["–"] * 5])
            continue
        count += 1
        same += bool(row.get("same_peak"))
        within += row["tags"] is not None and row["free"] is not None and row["tags"] <= row["free"] + 1e-9
        cells.append(
            [row["graph"], f"{row['share']} %", _percent(row["free"]), _percent(row["free_bound"]),
             _percent(row.get("same")), _percent(row["tags"]),
             _percent(row["tags_bound"]) + (" (in the space)" if row["tags_bound_in_space"] else ""),
             "yes" if row.get("same_peak") else "–"]
        )  # fmt: skip
    said = (
        f"Of {count} problems with a plan, torch carries out {same} of the free plans at the same cost and peak; in "
        f"{within} the best plan by tags is as cheap as the best free one found.\n"
    )
    return table(COLUMNS, cells) + "\n" + said
