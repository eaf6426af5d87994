"""Certificates: `python -m benchmarks.solver.proofs` prints what of each answer is certified, and at what cost.

Each problem is solved with certificates and without, one after the other, so that the seconds compare. The certificate
is checked by `remat_ir` alone, and its size is compared with that of the plan, both as deflated JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.graphs.instances import instance
from benchmarks.harness.machine import machine
from benchmarks.harness.table import head, row
from remat_ir import Answer, Graph, Problem, Status, budget_at, verify_answer
from remat_solver import solve
from remat_solver.search import compiling

INSTANCES = ("gpt-12", "resnet-16", "unet-4", "densenet-24")
FRACTIONS = (0.9, 0.75, 0.5, 0.3)
GOAL = 0.001
_COLUMNS = (
    "instance", "ops", "budget", "ending", "cost +%", "certified gap %", "claimed gap %", "s", "s without",
    "certificate B", "plan B", "check ms",
)  # fmt: skip


class Measured(NamedTuple):
    """One problem: whether it is certified within the goal, and within twice the time of an answer without it."""

    certified: bool
    in_time: bool
    small: bool
    check_s: float
    cells: tuple[object, ...]


def measure(name: str, graph: Graph, fraction: float, limit: float) -> Measured:
    """Solve one problem both ways."""
    problem = Problem(graph, budget_at(graph, fraction))
    answer = solve(problem, time_limit_s=limit)
    plain = solve(problem, time_limit_s=limit, certify=False)
    began = time.perf_counter()
    verdict = verify_answer(problem, answer)
    check_s = time.perf_counter() - began
    certified = verdict.infeasible or (answer.gap is not None and answer.gap <= GOAL)
    proof = _deflated(None if answer.proof is None else answer.proof.to_json())
    plan = _deflated(None if answer.plan is None else answer.plan.to_json())
    claimed = answer.gap
    if answer.claimed_bound_ns is not None and answer.cost_ns:
        claimed = 1 - answer.claimed_bound_ns / answer.cost_ns
    cells = (
        name, graph.ops, fraction, _ending(answer, verdict.infeasible), _percent(answer.overhead),
        _percent(answer.gap), _percent(claimed), f"{answer.seconds:.1f}", f"{plain.seconds:.1f}",
        proof, plan, f"{1000 * check_s:.0f}",
    )  # fmt: skip
    return Measured(certified, answer.seconds <= 2 * plain.seconds + 1, proof <= max(plan, 500), check_s, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the instances, print the table and the shares that reach the goals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.proofs", description=__doc__)
    parser.add_argument("--graphs", nargs="*", default=[], metavar="FILE", help="more instances: remat-graph/1 files")
    parser.add_argument("--instances", nargs="*", default=list(INSTANCES))
    parser.add_argument("--budgets", nargs="*", type=float, default=list(FRACTIONS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each solve")
    parser.add_argument("--output", help="write the table here")
    options = parser.parse_args(arguments)
    before, began = machine(), time.monotonic()
    compiling().wait()
    graphs = {name: instance(name) for name in options.instances}
    graphs |= {Path(file).stem: Graph.from_json(Path(file).read_text()) for file in options.graphs}
    lines = [head(_COLUMNS)]
    print(lines[0], flush=True)
    done: list[Measured] = []
    for name, graph in graphs.items():
        for fraction in options.budgets:
            done.append(measure(name, graph, fraction, options.limit))
            lines.append(row(done[-1].cells))
            print(lines[-1], flush=True)
    foot = ["", *_shares(done), "", f"{machine('highspy').since(before)}; {time.monotonic() - began:.0f} s in all."]
    print("\n".join(foot))
    if options.output:
        Path(options.output).write_text("\n".join(["# Certificates, measured", "", *lines, *foot]) + "\n")
    return 0


def _shares(done: Sequence[Measured]) -> list[str]:
    count = len(done)
    certified = [one for one in done if one.certified]
    in_time = sum(one.in_time for one in certified)
    return [
        f"- {len(certified)} of {count} certified within 0.1 % (goal: 90 %), {in_time} in at most twice the time",
        f"- {sum(one.small for one in certified)} of {len(certified)} certificates at most as large as the plan",
        f"- longest check {1000 * max((one.check_s for one in done), default=0.0):.0f} ms, the plan's replay included",
    ]


def _ending(answer: Answer, infeasible: bool) -> str:
    if answer.status is Status.INFEASIBLE:
        return "no plan, certified" if infeasible else "no plan, claimed"
    return answer.status.value


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3f}"


def _deflated(data: object) -> int:
    return 0 if data is None else len(zlib.compress(json.dumps(data, separators=(",", ":")).encode()))


if __name__ == "__main__":
    sys.exit(main())
