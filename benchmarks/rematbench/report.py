"""Scores of rows: the table, a page with performance profiles, and the rows and the page in the repository.

For a problem, *best* is the least cost of any row, and *bound* the greatest certified bound of any row. A method's
*gap* there is (cost − bound) / cost, and 1 without a plan. Of a method over the problems that it was asked about (those
of its families, up to its ops):

- the shifted geometric mean of gaps in %: exp(mean(log(gap + 1))) − 1, of seconds the same with a shift of 1 s;
- *within 0.1 %* and *within 1 %*: on how many it is that close to the best cost known, in % of the best;
- *certified*: on how many its own certificate shows a gap of at most 0.1 %;
- the primal integral: the mean over time of (cost so far − best) / cost so far, 1 until the first plan; where a method
  reports no progress, its plan counts from its end;
- *gap by seed*: the least and the greatest mean gap of a seed, where there are several.

The performance profile of Dolan and Moré (2002): the share of problems on which a method's cost is at most τ times the
best cost of the methods shown. A row with `why` of a family that a method doesn't answer is no problem of it.

`benchmarks/results/rematbench.jsonl.xz` has a row for each problem and method, as runs write them, without those that a
method was not asked. A row takes the place of an older one of the same problem, method, seconds and seed.
"""

from __future__ import annotations

import html
import io
import json
import lzma
import math
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.table import table
from benchmarks.rematbench.instances import manifest

Row = dict[str, Any]
NOT_ASKED = ("doesn't answer this family", "not asked beyond")
COLUMNS = (
    "method", "problems", "plans", "gap, %", "within 0.1 %", "within 1 %", "certified", "seconds", "primal integral",
    "gap by seed, %",
)  # fmt: skip
RESULTS = Path(__file__).parents[1] / "results"
STORED = RESULTS / "rematbench.jsonl.xz"
PAGE = RESULTS / "rematbench.md"
NO_TRAINING = ("dag-", "dense-")
"""Graphs without a backward pass."""
MOST_OPEN = 20
SMALL = 1000
"""Ops up to which `auto` has ten seconds in the results."""


def asked(row: Row) -> bool:
    """Whether the method was asked at all."""
    return not row["why"].startswith(NOT_ASKED)


def shifted(numbers: Sequence[float], shift: float = 1.0) -> float:
    """The shifted geometric mean."""
    return math.exp(sum(math.log(number + shift) for number in numbers) / len(numbers)) - shift if numbers else math.nan


def gap(cost: float | None, bound: float) -> float:
    """(cost − bound) / cost; 1 without a plan."""
    return 1.0 if cost is None else (cost - bound) / cost if cost else 0.0


def known(rows: Iterable[Row]) -> tuple[dict[str, int], dict[str, int]]:
    """The least cost and the greatest bound of each problem."""
    best: dict[str, int] = {}
    bound: dict[str, int] = {}
    for row in rows:
        key = row["problem"]
        bound[key] = max(row["bound_ns"], bound.get(key, 0))
        if row["cost_ns"] is not None:
            best[key] = min(row["cost_ns"], best.get(key, row["cost_ns"]))
    return best, bound


def primal_integral(row: Row, best: int | None) -> float:
    """The mean over the seconds given of how far the plan so far is above the best one."""
    if best is None or row["cost_ns"] is None:
        return 1.0
    events = [(s, c) for s, c, _ in row["progress"] if c is not None] or [(row["seconds"], row["cost_ns"])]
    total, end = 0.0, max(row["seconds_given"], row["seconds"])
    points = [(0.0, None), *events, (end, None)]
    for (start, cost), (until, _) in pairwise(points):
        total += (min(until, end) - min(start, end)) * gap(cost, best)
    return total / end


def table_of(rows: Sequence[Row]) -> str:
    """The table, a line a method, the closest first; with what it was measured on."""
    best, bound = known(rows)
    lines: list[tuple[float, list[str]]] = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method and asked(row)]
        if not mine:
            continue
        off = [
            math.inf if row["cost_ns"] is None else row["cost_ns"] / max(1, best[row["problem"]]) - 1 for row in mine
        ]
        gaps = [100 * gap(row["cost_ns"], bound[row["problem"]]) for row in mine]
        mean, seeds = shifted(gaps), sorted({row["seed"] for row in mine})
        each = [shifted([g for g, row in zip(gaps, mine, strict=True) if row["seed"] == seed]) for seed in seeds]
        certified = sum(gap(row["cost_ns"], row["bound_ns"]) <= 0.001 for row in mine)
        integral = sum(primal_integral(row, best.get(row["problem"])) for row in mine) / len(mine)
        cells = [method, len(mine), sum(row["cost_ns"] is not None for row in mine), f"{mean:.3f}"]
        cells += [sum(x <= 0.001 for x in off), sum(x <= 0.01 for x in off), certified]
        cells += [f"{shifted([row['seconds'] for row in mine]):.2f}", f"{integral:.4f}"]
        cells += [f"{min(each):.3f} to {max(each):.3f}" if len(seeds) > 1 else "–"]
        lines.append((mean, list(map(str, cells))))
    return f"{table(COLUMNS, (cells for _, cells in sorted(lines)))}\n\n{said_of(rows)}"


def said_of(rows: Sequence[Row]) -> str:
    """Problems, commits, machines and load of rows, in a sentence."""
    if not rows:
        return "No rows."
    loads = [row["load"] for row in rows]
    each = {key: ", ".join(sorted({str(row[key]) for row in rows})) for key in ("commit", "machine", "seconds_given")}
    return (
        f"{len({row['problem'] for row in rows})} problems, {len(rows)} rows; commit {each['commit']}; "
        f"{each['machine']}; {each['seconds_given']} s each; load average {min(loads)} to {max(loads)}; "
        f"{min(row['date'] for row in rows)} to {max(row['date'] for row in rows)}."
    )


def profiles(rows: Sequence[Row]) -> dict[str, list[float]]:
    """By method: cost over the best cost, ascending, infinite without a plan; of all problems that have one."""
    best, _ = known(rows)
    cost = {(row["method"], row["problem"]): row["cost_ns"] for row in rows}
    found = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        costs = [(cost.get((method, problem)), least) for problem, least in best.items()]
        found[method] = sorted(math.inf if c is None else c / max(1, least) for c, least in costs)
    return found


def _picture(rows: Sequence[Row], family: str | None) -> str:
    """The profiles of a family, or of all, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    found = profiles([row for row in rows if family in (None, row["family"])])
    shares = {m: sum(r <= 1.5 for r in ratios) for m, ratios in found.items()}
    for number, (method, ratios) in enumerate(sorted(found.items(), key=lambda item: -shares[item[0]])):
        finite = [r for r in ratios if r <= 2]
        xs = [1.0, *finite, 2.0]
        ys = [sum(r <= 1 for r in finite), *range(1, len(finite) + 1), len(finite)]
        style = ("-", "--", ":")[number // 10 % 3]
        axes.step([x - 1 + 1e-4 for x in xs], [y / len(ratios) for y in ys], style, where="post", label=method)
    axes.set(xscale="log", xlim=(1e-4, 1), ylim=(0, 1.02), xlabel="cost over the best, − 1", ylabel="share of problems")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(family or "all families")
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight")
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def over_time(rows: Sequence[Row]) -> str:
    """By method that reports progress: its mean gap at moments of its time."""
    _, bound = known(rows)
    moments = (0.1, 0.3, 1, 3, 10, 30, 60)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows if row["progress"]):
        mine = [row for row in rows if row["method"] == method and asked(row)]
        gaps = []
        for moment in moments:
            costs = [[c for s, c, _ in row["progress"] if c is not None and s <= moment] for row in mine]
            each = [gap(c[-1] if c else None, bound[row["problem"]]) for c, row in zip(costs, mine, strict=True)]
            gaps.append(f"{100 * sum(each) / len(each):.2f} %")
        lines.append([method, *gaps])
    return table(("method", *(f"{moment} s" for moment in moments)), lines)


def write_page(rows: Sequence[Row], folder: Path) -> Path:
    """One HTML file: the table, profiles of all and of each family, the mean gap over time, and what was left open."""
    folder.mkdir(parents=True, exist_ok=True)
    families = list(dict.fromkeys(row["family"] for row in rows))
    pictures = [_picture(rows, family) for family in [None, *families]]
    open_ = [[row["problem"], row["method"], row["why"][:120]] for row in rows if row["cost_ns"] is None and asked(row)]
    parts = [
        "<!doctype html><meta charset=utf-8><title>RematBench</title><style>body{font:15px sans-serif;max-width:70em;"
        "margin:2em auto}pre{overflow:auto}</style><h1>RematBench</h1>",
        f"<pre>{html.escape(table_of(rows))}</pre>",
        "<h2>Performance profiles</h2><p>The share of problems on which a method costs at most so much over the best.",
        *pictures,
        f"<h2>Mean gap over time</h2><pre>{html.escape(over_time(rows))}</pre>",
        f"<h2>No plan</h2><pre>{html.escape(table(('problem', 'method', 'why'), open_))}</pre>",
    ]
    path = folder / "index.html"
    path.write_text("\n".join(parts) + "\n")
    return path


def stored(path: Path = STORED) -> list[Row]:
    """The rows of the repository."""
    if not path.exists():
        return []
    with lzma.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def store(rows: Iterable[Row], path: Path = STORED) -> list[Row]:
    """Take up rows, and give all that there are then. Of their progress the moments with a cheaper plan are stored."""
    found = {_key(row): row for row in stored(path)}
    for row in filter(asked, rows):
        moments, cheapest = [], None
        for moment in row["progress"]:
            if moment[1] is not None and (cheapest is None or moment[1] < cheapest):
                cheapest = moment[1]
                moments.append(moment)
        found[_key(row)] = row | {"progress": moments}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    with lzma.open(aside, "wt", preset=9) as file:
        file.writelines(json.dumps(found[key], separators=(",", ":")) + "\n" for key in sorted(found))
    aside.replace(path)
    return [found[key] for key in sorted(found)]


def _key(row: Row) -> tuple[str, str, float, int]:
    return row["problem"], row["method"], row["seconds_given"], row["seed"]


def not_run(rows: Sequence[Row], path: Path = STORED) -> list[Row]:
    """Stored rows of methods that a run left out, of its problems and from machines of its kind, marked in the name."""
    run, problems = {row["method"] for row in rows}, {row["problem"] for row in rows}
    machines = {row["machine"] for row in rows}
    return [
        row | {"method": f"{row['method']} (stored)"}
        for row in stored(path)
        if row["method"] not in run and row["problem"] in problems and row["machine"] in machines
    ]


def _longest(rows: Iterable[Row]) -> list[Row]:
    """Of each problem the row that had the most time."""
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row["seconds_given"]):
        found[row["problem"]] = row
    return [found[key] for key in sorted(found)]


def _rows_by_size(rows: Sequence[Row]) -> list[Row]:
    """Of each problem one row: of small ones that with the usual time, of larger ones that with the most."""
    return _longest(row for row in rows if row["ops"] > SMALL or row["seconds_given"] == 10.0)


def _scores(named: Iterable[tuple[str, list[Row]]], bound: dict[str, int]) -> str:
    """A line for each group of `auto`'s rows."""
    lines = []
    for name, rows in named:
        if rows:
            gaps = [gap(row["cost_ns"], bound[row["problem"]]) for row in rows]
            share = sum(g <= 0.001 for g in gaps)
            cells = [name, len(rows), sum(row["cost_ns"] is not None for row in rows)]
            cells += [f"{share} ({100 * share // len(rows)} %)", sum(g <= 0.01 for g in gaps)]
            cells += [f"{shifted([100 * g for g in gaps]):.3f}", f"{shifted([row['seconds'] for row in rows]):.1f}"]
            lines.append(cells)
    columns = ("graphs", "problems", "plans", "gap at most 0.1 %", "at most 1 %", "mean gap, %", "mean seconds")
    return table(columns, lines)


def page(rows: Sequence[Row], bench: Collection[str]) -> str:
    """The results as Markdown.

    Args:
        bench: the problems of `make bench`.
    """
    _, bound = known(rows)
    entries, asked_auto = manifest(), [row for row in rows if row["method"] == "auto" and row["seed"] == 0]
    auto, longest = _rows_by_size(asked_auto), _longest(asked_auto)
    families = dict.fromkeys(row["family"] for row in auto)
    each = [(name, [row for row in auto if row["family"] == name]) for name in families]

    def of_training(row: Row) -> bool:
        peak: int = entries[row["problem"].partition("@")[0]]["plain_peak_bytes"]
        known_kind = row["family"] != "link" and not row["problem"].startswith(NO_TRAINING)
        return known_kind and row["ops"] <= 1000 and row["budget_bytes"] >= 0.3 * peak

    training = [row for row in auto if of_training(row)]
    given_more = [row for row in longest if of_training(row)]
    worst = []
    for row in sorted(auto, key=lambda row: -gap(row["cost_ns"], bound[row["problem"]]))[:MOST_OPEN]:
        plain, least = row["total_ns"], bound[row["problem"]]
        over = "–" if row["cost_ns"] is None else f"{100 * (row['cost_ns'] / plain - 1):.2f}"
        more = f"{100 * (least / plain - 1):.2f}", f"{100 * gap(row['cost_ns'], least):.2f}"
        worst.append((row["problem"], row["ops"], over, *more))
    parts = [
        "# RematBench, measured",
        "This page is for researchers who compare methods of rematerialization. "
        "`python -m benchmarks.rematbench --store` writes it from `rematbench.jsonl.xz`; "
        "[the benchmark's page](../../docs/rematbench.md) says what the columns are.",
        "## `auto` on every graph",
        "A gap is (cost − bound) / cost with the greatest certified bound of any row; means are shifted geometric "
        "means. *Training* are graphs with a backward pass and no link, of up to 1,000 ops, at 0.3 of their plain peak "
        f"or more. Graphs of up to {SMALL} ops have 10 s, larger ones 60 s where that was run. *Training, 60 s* has "
        "rows of 60 s in place of those that left more than 0.1 %, where that was run.",
        _scores([*each, ("all", auto), ("*training*", training), ("*training*, 60 s", given_more)], bound),
        f"{said_of(auto)} The set has {6 * len(entries)} problems.",
        "## 24 graphs at three budgets",
        "The problems of `make bench`, by every method that answers their family.",
        table_of([r for r in rows if r["problem"] in bench and (r["method"] != "auto" or r["seconds_given"] == 10.0)]),
        "## Mean gap over time",
        over_time(auto),
        f"## The {len(worst)} problems that are furthest from proved",
        "Overhead and bound in % over plain training.",
        table(("problem", "ops", "overhead", "bound", "gap, %"), worst),
    ]
    return "\n\n".join(parts) + "\n"
