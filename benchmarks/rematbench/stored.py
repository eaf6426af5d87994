"""The results in the repository: rows that were measured, and the page made of them.

    python -m benchmarks.rematbench --store           take up the rows of `--rows`, and write the page again

`rematbench.jsonl.xz` has a row for each problem and method, as runs write them, without those that a method was not
asked. A row takes the place of an older one of the same problem, method, seconds and seed.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from benchmarks.harness.table import table
from benchmarks.rematbench.instances import manifest
from benchmarks.rematbench.report import Row, asked, gap, known, over_time, said_of, shifted, table_of

RESULTS = Path(__file__).parents[1] / "results"
STORED = RESULTS / "rematbench.jsonl.xz"
PAGE = RESULTS / "rematbench.md"
NO_TRAINING = ("dag-", "dense-")
"""Graphs without a backward pass."""
MOST_OPEN = 20


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
    entries, auto = manifest(), [row for row in rows if row["method"] == "auto" and row["seed"] == 0]
    families = dict.fromkeys(row["family"] for row in auto)
    each = [(name, [row for row in auto if row["family"] == name]) for name in families]

    def share(row: Row) -> float:
        peak: int = entries[row["problem"].partition("@")[0]]["plain_peak_bytes"]
        return row["budget_bytes"] / peak

    training = [r for r in auto if r["ops"] <= 1000 and share(r) >= 0.3 and not r["problem"].startswith(NO_TRAINING)]
    training = [row for row in training if row["family"] != "link"]
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
        "or more.",
        _scores([*each, ("all", auto), ("*training*", training)], bound),
        f"{said_of(auto)} The set has {6 * len(entries)} problems.",
        "## 24 graphs at three budgets",
        "The problems of `make bench`, by every method that answers their family.",
        table_of([row for row in rows if row["problem"] in bench]),
        "## Mean gap over time",
        over_time(auto),
        f"## The {len(worst)} problems that are furthest from proved",
        "Overhead and bound in % over plain training.",
        table(("problem", "ops", "overhead", "bound", "gap, %"), worst),
    ]
    return "\n\n".join(parts) + "\n"
