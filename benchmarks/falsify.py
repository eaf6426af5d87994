"""Look for bounds that are wrong: `python -m benchmarks.falsify` ends with 1 where it finds one, its instance written.

Stored graphs with what is known about them, and graphs, chains and joins drawn at random, are solved by every method
and engine that takes them, under several budgets each. Every bound that is reported on the way is compared with every
plan of its space, under all budgets that it holds for; so what one engine proves is compared with what others find.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.solver.cases import BEST_KNOWN, CASES, cases_of, problem_of
from remat_ir import (
    Chain,
    Graph,
    Join,
    Link,
    Problem,
    Progress,
    RematError,
    Subject,
    graph_of,
    plain_peak,
    problem_digest,
)
from remat_solver import METHODS, solve
from remat_solver.backends.engine import ENGINES
from remat_solver.bounds import least_need
from remat_solver.contradiction import Evidence
from remat_solver.deadline import Deadline
from remat_solver.kernels import loading

_SMALL = 40
"""Ops up to which the reference programs, which have a row for each stage, are solved too."""
_BUDGETS = 2
"""Budgets for each subject that is drawn: bounds of one are compared with plans of the other."""


@dataclass(frozen=True)
class Way:
    """A method with its options: who says something about a problem."""

    method: str
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options)])


def ways_for(problem: Problem) -> list[Way]:
    """Every method that takes a problem of this kind and size, by every engine that the method takes."""
    subject = problem.subject
    ops = subject.to_graph().ops if isinstance(subject, Chain) else subject.ops if isinstance(subject, Graph) else 0
    ways: list[Way] = []
    for name, method in METHODS.items():
        takes = problem.kind in method.takes or (problem.kind == "chain" and "graph" in method.takes)
        if not takes or (name.startswith("milp") and ops > _SMALL):
            continue
        engines = ENGINES if "engine" in {field.name for field in fields(method.options)} else ()
        ways += [Way(name, (("engine", engine),)) for engine in engines] or [Way(name)]
    return ways


class Falsifier:
    """Gathers evidence on problems until the time is over.

    Attributes:
        found: the contradictions, one sentence each; their instances are in the folder.
        problems, solves, comparisons: how much was looked at.
    """

    def __init__(self, seconds: float, solve_s: float, seed: int, folder: Path) -> None:
        self.deadline, self.solve_s, self.seed, self.folder = Deadline(seconds), solve_s, seed, folder
        self.found: list[str] = []
        self.problems = self.solves = self.comparisons = 0

    def run(self, folders: Sequence[Path], most_ops: int) -> None:
        """Stored and drawn problems in turn until the time is over."""
        stored, drawn = self._stored(folders, most_ops), self._drawn()
        while not self.deadline.passed():
            for evidence, budgets in (*islice(stored, 1), *islice(drawn, 3)):
                self.look(evidence, budgets)

    def look(self, evidence: Evidence, budgets: Sequence[int]) -> None:
        """Solve a subject under some budgets in every way, and compare all that is known then."""
        for budget in budgets:
            problem = Problem(evidence.subject, budget)
            ways = ways_for(problem)
            random.Random(f"{self.seed} {problem_digest(problem)}").shuffle(ways)
            for way in ways:
                if self.deadline.passed():
                    break
                self._solve(evidence, problem, way)
            self.problems += 1
        self.comparisons += evidence.comparisons
        for refutation in evidence.refutations():
            self._write(str(refutation), refutation.to_json())

    def summary(self) -> str:
        """What was looked at, and what was found."""
        looked = f"{self.problems} problems, {self.solves} solves, {self.comparisons} pairs of a bound and a plan"
        if not self.found:
            return f"{looked}: no contradiction."
        return "\n".join([f"{looked}: {len(self.found)} contradictions, written to {self.folder}", *self.found])

    def _solve(self, evidence: Evidence, problem: Problem, way: Way) -> None:
        source, news = str(way), list[Progress]()
        self.solves += 1
        try:
            answer = solve(
                problem,
                method=way.method,
                options=dict(way.options),
                time_limit_s=max(0.1, min(self.solve_s, self.deadline.remaining())),
                max_gap=0.0,
                on_progress=news.append,
            )
            evidence.answer(answer, source)
        except RematError as error:  # a contradiction within the solve, a plan that the verifier refuses
            claim = f"{source}: {type(error).__name__}: {error}"
            self._write(claim, {"claim": claim, "problem": problem.to_json(), "method": str(way)})
        for progress in news:
            evidence.progress(problem.budget_bytes, progress, source)

    def _write(self, claim: str, instance: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.found.append(claim)
        (self.folder / f"{len(self.found):03}.json").write_text(json.dumps(instance))

    def _stored(self, folders: Sequence[Path], most_ops: int) -> Iterator[tuple[Evidence, list[int]]]:
        """The cases of the solver's benchmark with the best costs and bounds that it has noted, and more folders."""
        known = {row["instance"]: row for row in json.loads(BEST_KNOWN.read_text())}
        cases = [*(case for folder in folders for case in cases_of(folder)), *CASES]
        random.Random(self.seed).shuffle(cases)
        for case in cases:
            problem = problem_of(case, folders)
            if problem.graph.ops > most_ops:
                continue
            evidence, row = Evidence(problem.subject), known.get(case.key, {})
            if row.get("bound_ns") is not None:
                evidence.bound(problem.budget_bytes, row["bound_ns"], (), f"noted for {case.key}")
            if row.get("cost_ns") is not None:
                evidence.known(problem.budget_bytes, row["cost_ns"], f"noted for {case.key}")
            yield evidence, [problem.budget_bytes]

    def _drawn(self) -> Iterator[tuple[Evidence, list[int]]]:
        draw = random.Random(self.seed)
        while True:
            subject = draw.choice((drawn_graph, drawn_graph, drawn_chain, drawn_join))(draw)
            least, most = least_need(subject)[0], plain_peak(subject)
            budgets = sorted({least + int(draw.random() * 0.8 * (most - least)) for _ in range(_BUDGETS)})
            yield Evidence(subject), budgets


def drawn_graph(draw: random.Random) -> Subject:
    """A training graph of 6 to 60 ops, or a graph without a backward pass; some with small costs, where ties abound,
    one in three with a link to the host.
    """
    ops, most = draw.choice((6, 8, 12, 20, 30, 40, 60)), draw.choice((3, 100, 100_000))
    half = ops // 2 if draw.random() < 0.7 else ops
    skips = [{draw.randrange(op)} if draw.random() < 0.4 else set() for op in range(1, half)]
    inputs = [[], *(sorted({op, *skip}) for op, skip in enumerate(skips))]
    inputs += [sorted({op - 1, ops - 1 - op, max(0, ops - 2 - op)}) for op in range(half, ops)]
    return graph_of(
        [draw.randint(draw.choice((0, 1)), most) for _ in range(ops)],
        [draw.randint(1, most) for _ in range(ops)],
        inputs,
        op_workspace_bytes=tuple(draw.randint(0, most) if draw.random() < 0.2 else 0 for _ in range(ops)),
        keep=tuple(sorted(draw.sample(range(ops), draw.choice((0, 0, 1, 2))))),
        fixed_bytes=draw.choice((0, most)),
        backward_from=half if half < ops else None,
    ).with_link(draw.choice((None, None, drawn_link(draw))))


def drawn_link(draw: random.Random) -> Link:
    """A link of a tenth of a byte to ten bytes a ns, some with a latency, some to a host with a limit."""
    speeds = (10**8, 10**9, 10**10)
    return Link(draw.choice(speeds), draw.choice(speeds), draw.choice((0, 0, 5)), draw.choice((None, None, 300)))


def drawn_chain(draw: random.Random) -> Subject:
    """A chain of 2 to 10 stages, one in three with a link to the host."""
    stages, most = draw.randint(2, 10), draw.choice((4, 1000))

    def numbers(count: int, least: int = 0) -> tuple[int, ...]:
        return tuple(draw.randint(least, most) for _ in range(count))

    activations, rests, workspaces = numbers(stages + 1, 1), numbers(stages), numbers(stages)
    untaped = tuple(taped + draw.randint(0, rest) for taped, rest in zip(workspaces, rests, strict=True))
    return Chain(
        forward_ns=numbers(stages, 1),
        backward_ns=numbers(stages, 1),
        forward_workspace_bytes=workspaces,
        untaped_workspace_bytes=draw.choice((None, untaped)),
        backward_workspace_bytes=numbers(stages),
        tape_bytes=tuple(size + more for size, more in zip(activations[1:], rests, strict=True)),
        activation_bytes=activations,
        gradient_bytes=numbers(stages + 1),
        link_bytes_per_s=draw.choice((None, None, 10**9)),
    )


def drawn_join(draw: random.Random) -> Subject:
    """Two to four branches of up to eight steps that meet."""
    lengths = tuple(draw.randint(1, 8) for _ in range(draw.randint(2, 4)))
    forward, backward, turn = (draw.randint(1, 9) for _ in range(3))
    return Join(lengths, forward, backward, turn, slots=2 * sum(lengths) + 2, slot_bytes=draw.randint(1, 100))


def main(arguments: Sequence[str] | None = None) -> int:
    """Search until the time is over; 1 where something is contradicted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.falsify", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of it")
    parser.add_argument("--solve", type=float, default=2.0, help="seconds for each solve")
    parser.add_argument("--seed", type=int, default=0, help="of the problems that are drawn")
    parser.add_argument("--graphs", nargs="+", default=[], metavar="DIR", help="folders of more remat-graph files")
    parser.add_argument("--most-ops", type=int, default=400, help="larger stored graphs are left out")
    parser.add_argument("--instances", type=Path, default=Path("falsified"), help="where contradictions are written")
    options = parser.parse_args(arguments)
    loading().wait()  # before the time begins: a first run on a machine compiles the search for a minute
    falsifier = Falsifier(options.seconds, options.solve, options.seed, options.instances)
    falsifier.run([Path(folder) for folder in options.graphs], options.most_ops)
    print(falsifier.summary())
    return 1 if falsifier.found else 0


if __name__ == "__main__":
    sys.exit(main())
