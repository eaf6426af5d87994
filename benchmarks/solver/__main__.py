"""Measure the solver: `python -m benchmarks.solver` prints one table and what share of the cases reaches each aim."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import commit, machine
from benchmarks.harness.table import Report, table
from benchmarks.solver.cases import AIMS, BEST_KNOWN, CASES, FIRST_PLAN, QUICK, Case, Run, cases_of, problem_of
from remat_ir import Progress
from remat_solver import solve
from remat_solver.kernels import loading


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table, note better costs and bounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    parser.add_argument("--instances", nargs="+", help="names, or name@fraction")
    parser.add_argument("--graphs", nargs="+", default=[], metavar="DIR", help="folders of more remat-graph files")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--limit", type=float, help="seconds per case, in place of its own")
    parser.add_argument("-o", "--output", type=Path, help="append the table to this file, as Markdown")
    options = parser.parse_args(arguments)
    folders = [Path(folder) for folder in options.graphs]
    cases = list(CASES)
    for folder in folders:
        listed = {case.key for case in cases}
        cases += [case for case in cases_of(folder) if case.key not in listed]
    if options.quick:
        cases = [case for case in cases if case.key in QUICK] or cases[:3]
    if options.instances:
        cases = [case for case in cases if case.name in options.instances or case.key in options.instances]
    if not cases:
        print("no such instance", file=sys.stderr)
        return 2
    noted = BEST_KNOWN.read_text() if BEST_KNOWN.exists() else "[]"
    known: dict[str, dict[str, Any]] = {row["instance"]: row for row in json.loads(noted)}
    began = time.monotonic()
    loading().wait()
    runs: list[Run] = []
    with Report("What the solver reaches", _COLUMNS, options.output, "highspy", "numba", "numpy") as report:
        for case in cases:
            run, cells = _measure(case, folders, known, options.method, options.limit)
            runs.append(run)
            report.add(*cells)
            if options.method == "auto":
                # after each case, so that a run that is cut short keeps what it has found
                BEST_KNOWN.write_text(json.dumps(sorted(known.values(), key=lambda r: r["instance"]), indent=1) + "\n")
        here = f"Commit {commit()}, {machine().date}; {time.monotonic() - began:.0f} s in all."
        report.say(f"\n{_shares(runs)}\n\n{here} {_CLOCKS}\n")
    return 0


_COLUMNS = (
    *("instance", "ops", "budget", "first plan s", "over best at 1 s %", "at 3 s %", "at 10 s %", "overhead %"),
    *("bound %", "gap %", "status", "s", "CPU s"),
)
_CLOCKS = "Times are wall-clock; CPU s is the work of all threads and engines."


def _measure(
    case: Case, folders: Sequence[Path], known: dict[str, dict[str, Any]], method: str, limit: float | None
) -> tuple[Run, list[str]]:
    problem = problem_of(case, folders)
    total = problem.graph.total_cost_ns
    track: list[tuple[float, int | None, int]] = []

    def note(news: Progress) -> None:
        # a bound inside a restriction counts in the table only as far as the whole space has it
        bound = news.whole_bound_ns
        track.append((news.seconds, news.cost_ns, total if bound is None else bound))

    spent = _cpu_s()
    answer = solve(
        problem,
        method=method,
        time_limit_s=limit or AIMS[case.aim].seconds,
        max_gap=AIMS[case.aim].gap,
        on_progress=note,
    )
    best = _best(known, case, answer.cost_ns, None if answer.restricted_to else answer.bound_ns)
    run = Run(case, problem.graph.ops, track, answer.status.value, best, total)
    first = run.first_s()
    cells = [
        case.name,
        str(run.ops),
        case.key.partition("@")[2],
        "–" if first is None else f"{first:.2f}",
        *(_percent(run.off_at(seconds)) for seconds in (1, 3, 10)),
        _percent(answer.overhead, 3),
        "–" if answer.bound_ns is None else _percent(answer.bound_ns / total - 1 if total else 0.0, 3),
        _percent(answer.gap),
        answer.status.value + (" (restricted)" if answer.restricted_to else ""),
        f"{answer.seconds:.1f}",
        f"{_cpu_s() - spent:.1f}",
    ]
    return run, cells


def _cpu_s() -> float:
    """CPU seconds of this process and of the engines that have ended: what a busy machine cannot stretch."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _percent(share: float | None, digits: int = 2) -> str:
    return "–" if share is None or share == float("inf") else f"{100 * share:.{digits}f}"


def _best(known: dict[str, dict[str, Any]], case: Case, cost_ns: int | None, bound_ns: int | None) -> int | None:
    """The best known cost, this run's included, noted with the best bound."""
    row = known.setdefault(case.key, {"instance": case.key, "cost_ns": None, "bound_ns": None})
    if cost_ns is not None and (row["cost_ns"] is None or cost_ns < row["cost_ns"]):
        row["cost_ns"] = cost_ns
    if bound_ns is not None and (row["bound_ns"] is None or bound_ns > row["bound_ns"]):
        row["bound_ns"] = bound_ns
    best: int | None = row["cost_ns"]
    return best


def _shares(runs: Sequence[Run]) -> str:
    """On how many cases each aim was reached; those without any plan are none."""
    rows = []
    for name, aim in AIMS.items():
        about = [run for run in runs if run.case.aim == name and (run.status != "infeasible" or aim.gap == FIRST_PLAN)]
        if about:
            rows.append((aim.words, f"{sum(aim.reached(run) for run in about)} of {len(about)}"))
    return table(("aim", "reached on"), rows)


if __name__ == "__main__":
    sys.exit(main())
