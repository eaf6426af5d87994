"""Run methods on RematBench, and print the table.

    python -m benchmarks.rematbench --bench                  24 graphs × 3 budgets, `auto` at 10 s, fast baselines
    python -m benchmarks.rematbench --all --seconds 60       all instances, all methods: for who has a day
    python -m benchmarks.rematbench --folder DIR           the graphs of others' node-link files, such as Moccasin's
    python -m benchmarks.rematbench --table                  the table of the rows that there are
    python -m benchmarks.rematbench --store                  take them up in benchmarks/results, and write its page

A run appends one row for each problem and method to a file (`--rows`), and goes on there after it was stopped: what the
file has at the same seconds and seed is not run again. `--minutes` ends a run between two rows. `--answers` keeps the
best plans and certificates as a folder that `check.py` confirms. `--report` writes a page with performance profiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import commit, machine
from benchmarks.harness.rows import add_row, read_rows
from benchmarks.rematbench import check
from benchmarks.rematbench.instances import Instance, load, manifest, outside, write
from benchmarks.rematbench.methods import FAST, METHODS, Measured, Question, measure
from benchmarks.rematbench.report import PAGE, not_run, page, store, table_of, write_page
from remat_solver.kernels import loading

BENCH = (
    *("gpt2-medium-grouped", "llama3-1b-grouped", "qwen2-half-b-grouped", "qwen3-2b-grouped", "gemma2-2b-grouped"),
    *("opt-1b-grouped", "mixtral-small-grouped", "olmoe-small-grouped", "resnet50-grouped"),
    *("checkmate-unet-b32", "checkmate-mobilenet-b32", "checkmate-resnet50-b32", "checkmate-segnet-b32"),
    *("dag-100-s1", "dag-500-s1", "dense-250-s1", "random-125-s1", "gpt-12-whole", "unet-4"),
    *("chain-resnet18-8x500", "chain-random-16", "join-8-8-8", "resnet-8-pcie4", "pofo-inception-16x299-pcie3"),
)

BENCH_BUDGETS = (0, 2, 4)
VERSION = "rematbench 0.1"
"""Of answers."""


def keep_best(folder: Path, question: Question, method: str, found: Measured) -> None:
    """Take up a cheaper plan, or a greater certified bound, with who found it and in how many seconds.

    Of a graph with a link the bound stays out: `check.py` knows no certificates of it.
    """
    problem, path = question.problem, folder / "answers" / f"{question.key}.json.xz"
    graph_path = folder / "graphs" / f"{question.instance.name}.json.xz"
    if not graph_path.exists():
        write(graph_path, problem.graph.to_json())
    if path.exists():
        answer: dict[str, Any] = check.load(path)
    else:
        document = json.loads(json.dumps(problem.graph.to_json()))
        answer = {"format": VERSION, "graph": question.instance.name, "budget_bytes": problem.budget_bytes}
        answer |= {"graph_digest": check.digest(check.read_graph(document))}
    before = dict(answer)
    if found.plan is not None and found.cost_ns is not None and found.cost_ns < answer.get("cost_ns", 2**63):
        answer |= {"plan": found.plan.to_json(), "cost_ns": found.cost_ns, "peak_bytes": found.peak_bytes}
        answer |= {"plan_by": method, "plan_seconds": found.seconds}
    if problem.graph.link is None and found.bound_ns > answer.get("bound_ns", -1):
        answer |= {"bound_ns": found.bound_ns, "proof": None if found.proof is None else found.proof.to_json()}
        answer |= {"bound_by": method, "bound_seconds": found.seconds}
    if answer != before and ("plan" in answer or "bound_ns" in answer):
        write(path, answer)


def run(
    given: argparse.Namespace,
    names: list[str],
    budgets: list[int],
    methods: list[str],
    others: dict[str, Instance] | None = None,
) -> None:
    """Ask each method about each problem that the file has no row of."""
    done = {(row["problem"], row["method"], row["seconds_given"], row["seed"]) for row in read_rows(given.rows)}
    left = [
        name
        for name in names
        if any((f"{name}@{k}", m, given.seconds, given.seed) not in done for k in budgets for m in methods)
    ]
    until = time.monotonic() + 60 * given.minutes
    at = commit()
    for instance in (load(name) if others is None else others[name] for name in left):
        for number, name in itertools.product(budgets, methods):
            question = Question(instance, number, given.seed)
            if (question.key, name, given.seconds, given.seed) in done:
                continue
            if time.monotonic() > until:
                print("the minutes are over: the same command goes on here")
                return
            found, here = measure(METHODS[name], question, given.seconds), machine()
            row = {
                "problem": question.key, "family": instance.family, "method": name, "seed": given.seed,
                "ops": question.problem.graph.ops, "seconds_given": given.seconds, "seconds": found.seconds,
                "cost_ns": found.cost_ns, "bound_ns": found.bound_ns, "claimed_ns": found.claimed_ns,
                "total_ns": question.problem.graph.total_cost_ns, "peak_bytes": found.peak_bytes,
                "budget_bytes": question.problem.budget_bytes, "why": found.why, "progress": found.progress,
                "commit": at, "machine": f"{here.cores} × {here.processor}", "load": here.load, "date": here.date,
            }  # fmt: skip
            add_row(given.rows, row)
            if given.answers is not None:
                keep_best(given.answers, question, name, found)
            over = "–" if found.cost_ns is None else f"{100 * (found.cost_ns / row['total_ns'] - 1):.2f} % over"
            print(f"{question.key} {name}: {over} in {found.seconds:.1f} s {found.why[:90]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for, print the table, write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rematbench", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all instances and all methods")
    parser.add_argument("--bench", action="store_true", help="24 graphs at three budgets, auto and the fast baselines")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--store", action="store_true", help="run nothing; add the rows to the repository's results")
    parser.add_argument("--folder", type=Path, help="the graphs of these node-link files in place of the manifest's")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each problem and method")
    parser.add_argument("--methods", help="names, separated by commas")
    parser.add_argument("--instances", help="names, separated by commas")
    parser.add_argument("--budgets", help="numbers from 0, the smallest, to 5, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10**6, help="ends the run between two rows after so long")
    parser.add_argument("--rows", type=Path, default=Path("rematbench-out/rows.jsonl"))
    parser.add_argument("--answers", type=Path, help="keep the best plans and certificates in this folder")
    parser.add_argument("--report", type=Path, help="write a page into this folder")
    given = parser.parse_args(arguments)
    others = None if given.folder is None else outside(given.folder)
    known = manifest() if others is None else others
    names = (given.instances or "").split(",") if given.instances else list(BENCH if given.bench else known)
    if not given.instances:
        for name in [name for name in names if name not in known]:
            print(f"{name} is not in the manifest: left out", file=sys.stderr)
        names = [name for name in names if name in known]
    usual = BENCH_BUDGETS if given.bench else range(6)
    budgets = [int(k) for k in given.budgets.split(",")] if given.budgets else list(usual)
    methods = given.methods.split(",") if given.methods else ["auto", *FAST] if given.bench else list(METHODS)
    for wrong in [*(n for n in names if n not in known), *(m for m in methods if m not in METHODS)]:
        parser.error(f"there is no {wrong}")
    if given.store:
        PAGE.write_text(
            page(store(read_rows(given.rows)), [f"{name}@{number}" for name in BENCH for number in BENCH_BUDGETS])
        )
        print(PAGE)
        return 0
    if not given.table:
        if not (given.all or given.bench or given.instances or given.folder):
            parser.error("write --all, --bench, --instances or --folder")
        loading().wait()
        print(f"{len(names)} graphs × {len(budgets)} budgets × {len(methods)} methods; load {os.getloadavg()[0]:.1f}")
        run(given, names, budgets, methods, others)
    rows = read_rows(given.rows)
    if given.bench:
        rows += not_run(rows)
    print(table_of(rows))
    if given.report is not None:
        print(write_page(rows, given.report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
