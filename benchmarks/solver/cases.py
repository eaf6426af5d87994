"""What the solver is measured on, and what it aims to reach there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.graphs.instances import instance
from remat_ir import Graph, InvalidData, Problem, budget_at
from remat_solver.bounds import pair_need

GRAPHS = Path(__file__).resolve().parents[2] / "tests" / "graphs"
BEST_KNOWN = Path(__file__).resolve().parent / "best_known.json"

Track = Sequence[tuple[float, int | None, int]]
"""(seconds, cost, bound) at each improvement, in ns."""


@dataclass(frozen=True)
class Case:
    """An instance under a budget: a fraction of the activation peak, or of what pairs of values need if `tight`."""

    name: str
    fraction: float
    seconds: float
    aim: str
    tight: bool = False

    @property
    def key(self) -> str:
        """What it is called in the list of best known costs."""
        return f"{self.name}@{'least*' if self.tight else ''}{self.fraction:g}"


@dataclass(frozen=True)
class Run:
    """How a case went: the improvements, and the cost and bound to measure them by."""

    case: Case
    ops: int
    track: Track
    status: str
    best_ns: int | None
    total_ns: int

    def cost_at(self, seconds: float) -> int | None:
        """The best cost after so many seconds, in ns."""
        costs = [cost for when, cost, _ in self.track if when <= seconds and cost is not None]
        return min(costs, default=None)

    def gap_at(self, seconds: float) -> float:
        """(cost − bound) / cost after so many seconds, infinite without a plan."""
        cost = self.cost_at(seconds)
        bound = max((bound for when, _, bound in self.track if when <= seconds), default=self.total_ns)
        return float("inf") if cost is None else max(0, cost - bound) / cost if cost else 0.0

    def off_at(self, seconds: float) -> float:
        """How far the cost is above the best known after so many seconds, as a share of it; infinite without a plan."""
        cost = self.cost_at(seconds)
        if cost is None or self.best_ns is None:
            return float("inf")
        return cost / self.best_ns - 1 if self.best_ns else 0.0

    def first_s(self) -> float | None:
        """When the first plan was there."""
        return min((when for when, cost, _ in self.track if cost is not None), default=None)

    def settled(self) -> bool:
        """Whether it ended with a plan or with a proof that there is none."""
        return self.cost_at(float("inf")) is not None or self.status == "infeasible"


@dataclass(frozen=True)
class Aim:
    """One line of what is to be reached, and whether a run reached it."""

    name: str
    words: str
    reached: Callable[[Run], bool]


def _gap(at_most: float, seconds: float) -> Callable[[Run], bool]:
    return lambda run: run.status == "infeasible" or run.gap_at(seconds) <= at_most


def _early(first_s: float, within_s: float) -> Callable[[Run], bool]:
    return lambda run: (run.first_s() or float("inf")) <= first_s and run.off_at(within_s) <= 0.01


def _medium_gap(run: Run) -> bool:
    return _gap(0.001, 30)(run) if run.case.fraction >= 0.5 else _gap(0.005, 60)(run)


def _large_gap(run: Run) -> bool:
    return _gap(0.001, 60)(run) if run.case.fraction >= 0.75 else _gap(0.005, 120)(run)


AIMS: dict[str, Aim] = {
    aim.name: aim
    for aim in (
        Aim("small", "up to 110 ops, budgets from 0.5: proved in 10 s", _gap(0.0, 10)),
        Aim("medium", "training graphs to 360 ops: gap 0.1 % in 30 s from 0.5, 0.5 % in 60 s from 0.3", _medium_gap),
        Aim(
            "large", "training graphs of 500 to 1,100 ops: gap 0.1 % in 60 s at 0.75, 0.5 % in 120 s at 0.5", _large_gap
        ),
        Aim("random", "random graphs at 0.75: gap 1.5 % in 120 s", _gap(0.015, 120)),
        Aim("dense", "random graphs at 0.5 to 0.4: a plan in 20 s", lambda run: run.cost_at(20) is not None),
        Aim("huge", "to 5,000 ops at 0.5: a plan in 1 s, within 1 % of the best known in 5 s", _early(1, 5)),
        Aim("vast", "10,000 ops at 0.5: within 1 % of the best known in 15 s", lambda run: run.off_at(15) <= 0.01),
        Aim(
            "deep",
            "deep networks of 1,000 to 10,000 ops under tight budgets: a plan in 10 s",
            lambda run: run.cost_at(10) is not None,
        ),
        Aim(
            "tight", "budgets within 10 % of what is proved necessary: a plan, or a proof of none, in 60 s", Run.settled
        ),
    )
}
EARLY = "training graphs to 1,000 ops, budgets from 0.4: a plan in 0.1 s, within 1 % of the best known in 3 s"


def early(runs: Iterable[Run]) -> list[bool]:
    """For each run that the aim of early plans is about, whether it was reached."""
    about = [run for run in runs if run.case.aim in ("small", "medium", "large") and run.case.fraction >= 0.4]
    return [_early(0.1, 3)(run) for run in about if run.ops <= 1000 and run.status != "infeasible"]


def _spread(aim: str, seconds: float, names: str, fractions: tuple[float, ...], tight: bool = False) -> list[Case]:
    return [Case(name, fraction, seconds, aim, tight) for name in names.split() for fraction in fractions]


CASES: tuple[Case, ...] = (
    # fractions above the working set's, which is 0.50 of gpt-3, 0.58 of gpt-4-whole and 0.32 of gpt-12-whole
    *_spread("small", 10, "vgg-16 resnet-4-whole unet-2 unet-2-whole tape-50 random-25 made-rt100", (0.75, 0.5)),
    *_spread("small", 10, "gpt-3 gpt-4-whole", (0.75, 0.6)),
    *_spread("medium", 30, "made-unet made-gpt12 made-resnet50 made-rt250", (0.75, 0.5)),
    *_spread("medium", 30, "unet-4-whole densenet-12 gpt-12-whole resnet-16-whole", (0.75, 0.5)),
    *_spread("medium", 60, "made-unet made-gpt12 made-resnet50 made-rt250 resnet-16-whole", (0.3,)),
    *_spread("medium", 60, "gpt-12-whole", (0.35,)),
    *_spread("large", 60, "made-rt500 gpt-24 gpt-36 gpt-36-whole resnet-40", (0.75,)),
    *_spread("large", 120, "made-rt500 gpt-24 gpt-36 gpt-36-whole resnet-40 random-250", (0.5,)),
    *_spread("random", 120, "dag-250 dag-500", (0.75,)),
    *_spread("dense", 20, "dag-500", (0.5, 0.45, 0.4)),
    *_spread("huge", 8, "gpt-160 resnet-200", (0.5,)),
    *_spread("vast", 20, "gpt-330", (0.5,)),
    *_spread("deep", 30, "gpt-36 gpt-160 gpt-330 gpt-430-whole", (1.05,), True),
    *_spread("deep", 30, "resnet-40 resnet-200", (0.25, 0.2)),
    *_spread("tight", 60, "made-unet made-gpt12 made-rt100 resnet-4-whole vgg-16 gpt-12-whole", (1.02, 1.08), True),
)
QUICK = ("made-unet@0.5", "made-gpt12@0.5", "gpt-36@0.5", "vgg-16@0.5", "resnet-4-whole@0.5")


def cases_of(folder: Path) -> list[Case]:
    """Every graph of a folder at 0.75, 0.5 and 0.3, aims by size."""
    found: list[Case] = []
    for path in sorted(folder.glob("*.json")):
        ops = len(json.loads(path.read_text())["op_cost_ns"])
        aim, seconds = ("small", 10.0) if ops <= 110 else ("medium", 60.0) if ops <= 360 else ("large", 120.0)
        if path.stem.startswith("random") and ops > 110:
            aim, seconds = "random", 120.0
        fractions = (0.9, 0.75) if path.stem.startswith("random") else (0.9, 0.75, 0.5, 0.3)
        found += [
            Case(path.stem, fraction, seconds, aim) for fraction in fractions if aim != "small" or fraction >= 0.5
        ]
    return found


def problem_of(case: Case, folders: Sequence[Path]) -> Problem:
    """The case's problem: a file of the first folder that has it, else a generated instance.

    Raises:
        InvalidData: neither exists.
    """
    for folder in (*folders, GRAPHS):
        path = folder / f"{case.name}.json"
        if path.exists():
            graph = Graph.from_json(path.read_text())
            break
    else:
        graph = instance(case.name)
    if not case.tight:
        return Problem(graph, budget_at(graph, case.fraction))
    least = pair_need(graph).least_bytes
    if case.fraction < 1:
        raise InvalidData("a budget below what pairs of values need is infeasible at once")
    return Problem(graph, graph.fixed_bytes + int(case.fraction * (least - graph.fixed_bytes)))
