"""Certificates: `python -m benchmarks.solver.proofs` prints what of each answer is certified, and at what cost.

Each problem is solved with certificates and without, one after the other, so that the seconds compare. What is not
certified within the goal is solved once more with more time. The certificate is checked by `remat_ir` alone, and its
size is compared with that of the plan, both as deflated JSON.
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
from benchmarks.harness.table import Report, row, table
from remat_ir import Answer, Graph, Problem, Proof, Status, budget_at, verify_answer
from remat_ir.proof import Leaf, StageProof, WindowProof
from remat_ir.proof.check import KIND
from remat_solver import solve
from remat_solver.kernels import loading

INSTANCES = ("gpt-12", "resnet-16", "unet-4", "densenet-24")
FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
GOAL = 0.001
_LONGER = ("instance", "budget", "cost +%", "certified gap %", "s", "certificate", "its B", "plan B", "check ms")
_COLUMNS = (
    "instance", "ops", "budget", "ending", "cost +%", "certified gap %", "claimed gap %", "gap without %", "s",
    "s without", "certificate", "its B", "plan B", "check ms",
)  # fmt: skip


class Measured(NamedTuple):
    """One problem: whether it is certified within the goal, and within twice the time of an answer without it.

    `training`: whether it has a backward pass. `linear`: by one linear program without cutting planes. `reached`:
    whether both answers reached the gap asked for.
    `longer`: of an answer with more time, whether that is certified, its seconds, and its cells; None where there was
    no need of one.
    """

    training: bool
    certified: bool
    linear: bool
    reached: bool
    seconds: float
    seconds_without: float
    small: bool
    ops: int
    check_s: float
    cells: tuple[object, ...]
    longer: tuple[bool, float, tuple[object, ...]] | None = None

    def within(self, seconds: float) -> bool:
        """Whether it was certified in so many seconds, of the longer run if there was one."""
        certified, taken = (self.certified, self.seconds) if self.longer is None else self.longer[:2]
        return certified and taken <= seconds


def measure(name: str, graph: Graph, fraction: float, limit: float, longer: float) -> Measured:
    """Solve one problem both ways, and once more where it is open."""
    problem = Problem(graph, budget_at(graph, fraction))
    answer = solve(problem, time_limit_s=limit)
    plain = solve(problem, time_limit_s=limit, certify=False)
    certified, proof, plan, check_s = _checked(problem, answer)
    again = None
    if not certified and longer > limit:
        second = solve(problem, time_limit_s=longer)
        closed, its, of_plan, took = _checked(problem, second)
        cells: tuple[object, ...] = (
            name, fraction, _percent(second.overhead), _percent(second.gap), f"{second.seconds:.1f}",
            _form(second.proof), its, of_plan, f"{1000 * took:.0f}",
        )  # fmt: skip
        again = closed, second.seconds, cells
    claimed = answer.gap
    if answer.claimed_bound_ns is not None and answer.cost_ns:
        claimed = 1 - answer.claimed_bound_ns / answer.cost_ns
    cells = (
        name, graph.ops, fraction, _ending(answer, certified), _percent(answer.overhead),
        _percent(answer.gap), _percent(claimed), _percent(plain.gap), f"{answer.seconds:.1f}", f"{plain.seconds:.1f}",
        _form(answer.proof), proof, plan, f"{1000 * check_s:.0f}",
    )  # fmt: skip
    return Measured(
        training=graph.backward_from is not None,
        certified=certified,
        linear=_form(answer.proof) in ("", "linear", "pairs"),
        reached=certified and (plain.status is Status.INFEASIBLE or (plain.gap is not None and plain.gap <= GOAL)),
        seconds=answer.seconds,
        seconds_without=plain.seconds,
        small=proof <= max(plan, 500),
        ops=graph.ops,
        check_s=check_s,
        cells=cells,
        longer=again,
    )


def _checked(problem: Problem, answer: Answer) -> tuple[bool, int, int, float]:
    """Whether an answer is certified within the goal; bytes of its certificate and its plan; seconds of the check."""
    began = time.perf_counter()
    verdict = verify_answer(problem, answer)
    check_s = time.perf_counter() - began
    certified = verdict.infeasible or (answer.gap is not None and answer.gap <= GOAL)
    proof = _deflated(None if answer.proof is None else answer.proof.to_json())
    plan = _deflated(None if answer.plan is None else answer.plan.to_json())
    return certified, proof, plan, check_s


def _form(proof: Proof | None) -> str:
    """What a certificate is made of."""
    if isinstance(proof, WindowProof):
        return f"{len(proof.parts)} parts, {len(proof.windows)} windows"
    if not isinstance(proof, StageProof):
        return "" if proof is None else "pairs"
    leaves = sum(isinstance(node, Leaf) for node in proof.nodes)
    cuts = sum(row[0] == KIND for row in proof.rows)
    # several trees of one leaf each are one vector each
    form = "linear" if leaves == len(proof.nodes) else f"{leaves} leaves"
    return f"{form}, {cuts} cuts" if cuts else form


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the instances, print the table and the shares that reach the goals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.proofs", description=__doc__)
    parser.add_argument("--graphs", nargs="*", default=[], metavar="PATH", help="remat-graph/1 files, folders of them")
    parser.add_argument("--instances", nargs="*", default=list(INSTANCES))
    parser.add_argument("--budgets", nargs="*", type=float, default=list(FRACTIONS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each solve")
    parser.add_argument(
        "--longer",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="for each that is open after that (default: not solved again)",
    )
    parser.add_argument("--output", type=Path, help="append the table to this file, as Markdown")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    loading().wait()
    graphs = {name: instance(name) for name in options.instances}
    given = (Path(path) for path in options.graphs)
    files = [file for path in given for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    graphs |= {file.stem: Graph.from_json(file.read_text()) for file in files}
    done: list[Measured] = []
    with Report("Certificates", _COLUMNS, options.output, "highspy") as report:
        for name, graph in graphs.items():
            for fraction in options.budgets:
                done.append(measure(name, graph, fraction, options.limit, options.longer))
                report.add(*done[-1].cells)
                if done[-1].longer is not None:
                    print(f"with {options.longer:g} s: {row(done[-1].longer[2])}", flush=True)
        again = [one.longer[2] for one in done if one.longer is not None]
        if again:
            report.say(f"\nWhat was open, with {options.longer:g} s:\n\n{table(_LONGER, again)}\n")
        report.say(f"\n{_shares(done, options.limit, options.longer)}\n\n{time.monotonic() - began:.0f} s in all.\n")
    return 0


def _shares(done: Sequence[Measured], limit: float, longer: float) -> str:
    """The goals, of training graphs, and of these and of graphs without a backward pass together."""
    training = [one for one in done if one.training]
    groups = {"training graphs": training, "all": done} if 0 < len(training) < len(done) else {"reached": done}
    each = [_reached(group, limit, longer) for group in groups.values()]
    rows = [(*figure, *(reached[i] for reached in each)) for i, figure in enumerate(_figures(limit, longer))]
    return table(("figure", "goal", *groups), rows)


def _figures(limit: float, longer: float) -> tuple[tuple[str, str], ...]:
    most = max(limit, longer)
    return (
        ("certified within 0.1 % in at most twice the time of an uncertified answer, and 1 s", "90 %"),
        (f"certified within 0.1 % in {limit:g} s", ""),
        (f"of those that one linear program leaves open: certified within 0.1 % in {most:g} s", "70 % in 60 s"),
        ("certificates at the default gap at most as large as the plan (or 500 B)", "all"),
        ("longest check, the plan's replay included", "0.2 s at 1,000 ops"),
        ("time of those where both answers reach the gap", "at most twice"),
    )


def _reached(done: Sequence[Measured], limit: float, longer: float) -> tuple[str, ...]:
    certified = [one for one in done if one.certified]
    in_time = sum(one.within(2 * one.seconds_without + 1) for one in done)
    open_ = [one for one in done if not one.linear or not one.certified]
    closed = sum(one.within(1.1 * max(limit, longer)) for one in open_)
    both = [one for one in done if one.reached]
    seconds, without = sum(one.seconds for one in both), sum(one.seconds_without for one in both)
    return (
        _of(in_time, len(done)),
        _of(len(certified), len(done)),
        _of(closed, len(open_)),
        _of(sum(one.small for one in certified), len(certified)),
        f"{1000 * max(one.check_s for one in done):.0f} ms, up to {max(one.ops for one in done)} ops",
        f"{len(both)}: {seconds:.0f} s with, {without:.0f} s without",
    )


def _of(some: int, all_: int) -> str:
    return f"{some} of {all_}" + (f" ({100 * some / all_:.0f} %)" if all_ else "")


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
