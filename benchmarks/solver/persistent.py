"""When a solve shows the persistent optimum of a linear network: `python -m benchmarks.solver.persistent [FILE ...]`.

A VGG16 and a MobileNet are captured here; a file is a training graph, such as the public ones of these two. Each is
solved as `remat solve` does it without a method, until the chain program's plan is reported as progress. Clock and CPU
seconds are counted from the start of the solve, reading the graph aside; the first row has no other solve before it in
its process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.figures.captured import BATCHES, V100
from benchmarks.harness.table import Report
from benchmarks.models.paper import NETWORKS
from remat.cli.app import read_subject
from remat.target.step import target_step
from remat_ir import Graph, Problem, Progress, budget_at, overhead_of
from remat_solver import solve
from remat_solver.chain.network import linear_network

COLUMNS = ("network", "ops", "stages", "budget", "persistent optimum", "shown after, s", "CPU s", "source before it")
SHOWN = "rotor"


def shown(name: str, graph: Graph, fraction: float) -> tuple[object, ...]:
    """The row of one graph: what the chain program's plan adds, and when it was there."""
    network = linear_network(graph)
    seen: list[tuple[Progress, float]] = []
    start = time.process_time()

    def note(progress: Progress) -> None:
        seen.append((progress, time.process_time() - start))

    solve(
        Problem(graph, budget_at(graph, fraction)),
        time_limit_s=10.0,
        on_progress=note,
        cancelled=lambda: any(progress.source == SHOWN for progress, _ in seen),
    )
    cells = [name, graph.ops, "–" if network is None else network.stages, f"{fraction:.0%}"]
    for number, (progress, cpu) in enumerate(seen):
        if progress.source == SHOWN and progress.cost_ns is not None:
            added = 100 * overhead_of(progress.cost_ns, graph.total_cost_ns)
            before = seen[number - 1][0].source if number else "none"
            return (*cells, f"+{added:.3f} %", f"{progress.seconds:.3f}", f"{cpu:.3f}", before)
    return (*cells, "not the cheapest plan when it was made", "", "", "")


def main() -> None:
    """Capture, read, solve, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="training graphs of linear networks")
    parser.add_argument("--fraction", type=float, default=0.9, help="of what plain training needs")
    given = parser.parse_args()
    graphs: dict[str, Graph] = {}
    for name in ("vgg16", "mobilenet"):
        graphs[f"{name}, captured"] = target_step(NETWORKS[name], V100, batch=BATCHES[name][1]).graph
    for path in given.files:
        subject = read_subject(path)
        if isinstance(subject, Graph):
            graphs[path.stem] = subject
    with Report("Until the persistent optimum is shown", COLUMNS, None) as report:
        for name, graph in graphs.items():
            report.add(*shown(name, graph, given.fraction))


if __name__ == "__main__":
    main()
