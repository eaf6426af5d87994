"""Stored answers for other costs: `python -m benchmarks.solver.noise` prints how often one is certified at once.

Each problem is solved once. Then its costs are measured again, so to speak: each op's is multiplied by a factor drawn
evenly from 1 ± noise. The plan is re-costed, the certificate carried over and checked, and their gap counted. Next to
it stands what a bound without a certificate would give: the extra cost, scaled by the least ratio of new to old costs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median

from benchmarks.graphs.instances import instance
from benchmarks.harness.machine import machine
from benchmarks.harness.table import head, row
from remat_ir import Answer, Graph, Problem, budget_at, certificate_for, gap_of, verify
from remat_solver import solve
from remat_solver.kernels import loading

INSTANCES = ("gpt-12", "resnet-16", "unet-4", "densenet-24")
FRACTIONS = (0.75, 0.5, 0.3)
NOISE = (0.02, 0.05, 0.10)
GOAL = 0.01
_COLUMNS = ("instance", "ops", "budget", "gap %", "noise ± %", "within 1 %", "gap now %", "gap by scaling %", "ms")


def measured_again(graph: Graph, noise: float, seed: int) -> Graph:
    """The graph with each cost multiplied by a factor drawn evenly from 1 ± noise."""
    dice = random.Random(seed)
    costs = tuple(round(cost * (1 + dice.uniform(-noise, noise))) for cost in graph.op_cost_ns)
    return replace(graph, op_cost_ns=costs)


def carried_over(problem: Problem, answer: Answer) -> tuple[float, int, float]:
    """A stored answer on a problem with other costs: its gap by the certificate, its cost in ns, and the seconds."""
    assert answer.plan is not None
    graph, began = problem.graph, time.perf_counter()
    cost = verify(problem, answer.plan).cost_ns
    bound = graph.total_cost_ns
    if answer.proof is not None:
        bound = max(bound, certificate_for(problem, answer.proof).bound_ns or 0)
    return gap_of(cost, bound), cost, time.perf_counter() - began


def scaled_bound(old: Graph, new: Graph, bound_ns: int) -> int:
    """ΣC′ + r · (L − ΣC) with r the least ratio of new to old costs, rounded up."""
    pairs = zip(old.op_cost_ns, new.op_cost_ns, strict=True)
    extra = min(Fraction(b, a) for a, b in pairs if a) * max(0, bound_ns - old.total_cost_ns)
    return new.total_cost_ns - (-extra.numerator // extra.denominator)


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve each problem once, measure it again many times, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.noise", description=__doc__)
    parser.add_argument("--graphs", nargs="*", default=[], metavar="FILE", help="more instances: remat-graph/1 files")
    parser.add_argument("--instances", nargs="*", default=list(INSTANCES))
    parser.add_argument("--budgets", nargs="*", type=float, default=list(FRACTIONS))
    parser.add_argument("--draws", type=int, default=20, help="times that each problem is measured again")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each solve")
    parser.add_argument("--output", help="write the table here")
    options = parser.parse_args(arguments)
    before, began = machine(), time.monotonic()
    loading().wait()
    graphs = {name: instance(name) for name in options.instances}
    graphs |= {Path(file).stem: Graph.from_json(Path(file).read_text()) for file in options.graphs}
    lines = [head(_COLUMNS)]
    print(lines[0], flush=True)
    shares: dict[float, list[bool]] = {noise: [] for noise in NOISE}
    for name, graph in graphs.items():
        for fraction in options.budgets:
            problem = Problem(graph, budget_at(graph, fraction))
            answer = solve(problem, time_limit_s=options.limit)
            if answer.plan is None or answer.gap is None:
                continue
            for noise in NOISE:
                gaps, scaled, seconds = [], [], []
                for draw in range(options.draws):
                    again = Problem(measured_again(graph, noise, draw), problem.budget_bytes)
                    gap, cost, took = carried_over(again, answer)
                    gaps.append(gap)
                    scaled.append(gap_of(cost, scaled_bound(graph, again.graph, answer.bound_ns or 0)))
                    seconds.append(took)
                near = [gap <= GOAL for gap in gaps]
                shares[noise] += near
                lines.append(
                    row((
                        name, graph.ops, fraction, f"{100 * answer.gap:.2f}", f"{100 * noise:g}",
                        f"{sum(near)} of {len(near)}", f"{100 * median(gaps):.2f}", f"{100 * median(scaled):.2f}",
                        f"{1000 * median(seconds):.0f}",
                    ))
                )  # fmt: skip
                print(lines[-1], flush=True)
    foot = [""]
    for noise, near in shares.items():
        foot.append(f"- costs ± {100 * noise:g} %: {sum(near)} of {len(near)} certified within 1 % at once")
    foot += ["", f"{machine('highspy').since(before)}; {time.monotonic() - began:.0f} s in all."]
    print("\n".join(foot))
    if options.output:
        title = "# Stored answers for other costs, measured"
        Path(options.output).write_text("\n".join([title, "", *lines, *foot]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
