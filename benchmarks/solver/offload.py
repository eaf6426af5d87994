"""Keep, recompute or offload: makespans over the bound, next to what others do.

`python -m benchmarks.solver.offload`: ten training graphs and chains, three budgets, three links. Every plan goes
through the one verifier; the bound of a row is what `auto` proved for it. `auto` and recompute only (the same solver on
the same graph or chain without its link) have the same seconds; the others end when they are done. On chains `pofo` is
part of `auto`, and stands in a column of its own; what baselines of graphs decide on the lift becomes plans of the
chain, which moves tapes whole.

Rows are kept as JSON lines, so that a run that was cut short goes on: `--more` rows at a time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.graphs.instances import instance
from benchmarks.harness.machine import machine
from benchmarks.harness.rows import add_row, read_rows
from benchmarks.harness.table import table
from benchmarks.solver.chains import random_chain
from remat.planning.links import LINKS
from remat_ir import Answer, Chain, Graph, Link, Problem, plain_peak
from remat_solver import solve
from remat_solver.bounds import least_need
from remat_solver.kernels import loading

RESULTS = Path(__file__).resolve().parents[1] / "results"
GRAPHS = ("vgg-16", "gpt-6-whole", "gpt-12", "resnet-8", "unet-3", "densenet-12", "random-40")
CHAINS = {"chain-8": 8, "chain-16": 16, "chain-32": 32}
BUDGETS = (0.2, 0.5, 0.8)
COLUMNS = ("auto", "pofo", "recompute", "offload", "save-on-cpu", "fractions")


def subject_of(name: str, link: Link) -> Graph | Chain:
    """A training graph with a link, or a chain with one that has no latency."""
    if name in CHAINS:
        return replace(random_chain(CHAINS[name], seed=CHAINS[name]), link_bytes_per_s=link.to_host_bytes_per_s)
    return instance(name).with_link(link)


def budget_of(subject: Graph | Chain, fraction: float) -> int:
    """A fraction of the way from the least that any op needs to the plain peak, so that no budget is hopeless."""
    least, _ = least_need(subject)
    return least + int(fraction * (plain_peak(subject) - least))


def asked(problem: Problem, method: str, seconds: float) -> Answer:
    """One solve."""
    return solve(problem, method=method, time_limit_s=seconds, max_gap=0.001)


def measured(name: str, link: str, fraction: float, seconds: float) -> dict[str, Any]:
    """One row: what each method's plan costs, None without one, and the bound."""
    subject = subject_of(name, LINKS[link])
    problem = Problem(subject, budget_of(subject, fraction))
    graph = subject.to_graph() if isinstance(subject, Chain) else subject
    alone = replace(subject, link_bytes_per_s=None) if isinstance(subject, Chain) else subject.with_link(None)
    best = asked(problem, "auto", seconds)
    costs = {
        "auto": best.cost_ns,
        "recompute": asked(Problem(alone, problem.budget_bytes), "auto", seconds).cost_ns,
        "offload": asked(problem, "offload-only", seconds).cost_ns,
        "save-on-cpu": asked(problem, "save-on-cpu", seconds).cost_ns,
        "fractions": asked(problem, "layer-fractions", seconds).cost_ns,
        "pofo": asked(problem, "pofo", seconds).cost_ns if problem.kind == "chain" else None,
    }
    bound = best.bound_ns if not best.restricted_to else subject.total_cost_ns
    return {
        "name": name, "link": link, "fraction": fraction, "ops": graph.ops, "status": best.status.value,
        "bound": bound, "once": subject.total_cost_ns, "seconds": seconds, "costs": costs,
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def every() -> Iterator[tuple[str, str, float]]:
    """The rows, so ordered that a part of them is of every kind."""
    links = tuple(LINKS)
    for shift in range(len(links)):
        for i, fraction in enumerate(BUDGETS):
            for name in (*GRAPHS, *CHAINS):
                yield name, links[(i + shift) % len(links)], fraction


def report(rows: list[dict[str, Any]], said: str) -> str:
    """The table, and what it says about the two claims that one would like to make."""
    body, never, close, counted = [], 0, 0, 0
    for one in sorted(rows, key=lambda row: (row["name"], row["link"], row["fraction"])):
        costs, bound = one["costs"], one["bound"]
        over = [f"{costs[c] / bound:.3f}" if costs.get(c) and bound else "–" for c in COLUMNS]
        if one["status"] == "infeasible":
            over = ["infeasible", *["–"] * (len(COLUMNS) - 1)]
        else:
            counted += 1
            others = [costs[c] for c in COLUMNS[1:] if costs.get(c)]
            mine = costs["auto"]
            never += (mine is not None and (not others or mine <= min(others))) or (mine is None and not others)
            close += mine is not None and mine <= 1.03 * bound
        bound_over = f"{bound / one['once']:.3f}" if bound else "–"
        body.append((one["name"], one["ops"], one["link"], one["fraction"], bound_over, *over))
    head = ("graph", "ops", "link", "budget", "bound / once", *COLUMNS)
    loads = [row["load"] for row in rows]
    return f"""# Keep, recompute or offload

Makespans over the bound (`python -m benchmarks.solver.offload`), {rows[0]["seconds"]:g} s for `auto` and `recompute`.
Budgets are fractions of the way from the least that any op needs to the plain peak; – is no plan; `bound / once` is the
bound over each op once. {said}; load average while the rows were measured {min(loads)} to {max(loads)}.

Of {counted} rows that are not infeasible, `auto` is no worse than every other column on {never}, and within 3 % of its
bound on {close}.

{table(head, body)}
"""


def main() -> None:
    """Measure rows that are not there yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of auto, and of recompute only")
    parser.add_argument("--more", type=int, default=None, help="rows to measure now; all by default")
    parser.add_argument(
        "--quick", action="store_true", help="the three smallest at half of the memory, 3 s each, nothing kept"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "offload.jsonl")
    given = parser.parse_args()
    loading().wait()
    if given.quick:
        rows = [measured(name, "pcie5", 0.5, 3.0) for name in ("vgg-16", "unet-3", "chain-8")]
        print(report(rows, str(machine("numpy", "highspy"))))
        return
    rows = read_rows(given.out)
    done = {(row["name"], row["link"], row["fraction"]) for row in rows}
    for key in [key for key in every() if key not in done][: given.more]:
        rows.append(measured(*key, given.seconds))
        add_row(given.out, rows[-1])
        print(json.dumps(rows[-1]), flush=True)
    given.out.with_suffix(".md").write_text(report(rows, str(machine("numpy", "highspy"))))


if __name__ == "__main__":
    main()
