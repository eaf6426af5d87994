"""What the solver is measured on, and what it aims to reach there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.graphs.instances import instance
from benchmarks.rematbench.instances import load, manifest
from remat_ir import Graph, InvalidData, Problem, budget_at
from remat_solver.bounds import pair_need

GRAPHS = Path(__file__).resolve().parents[2] / "tests" / "graphs"
BEST_KNOWN = Path(__file__).resolve().parent / "best_known.json"

Track = Sequence[tuple[float, int | None, int]]
"""(seconds, cost, bound) at each improvement, in ns."""


class Of(Enum):
    """What a budget is a share of, above fixed bytes."""

    PEAK = ""
    PAIRS = "pairs*"
    KNOWN = "known*"


@dataclass(frozen=True)
class Case:
    """An instance under a budget.

    Attributes:
        aim: the key of its line in `AIMS`.
        fraction: of the activation peak, of what pairs of values need, or of the least peak that RematBench knows.
    """

    name: str
    fraction: float
    aim: str
    of: Of = Of.PEAK

    @property
    def key(self) -> str:
        """What it is called in the list of best known costs."""
        return f"{self.name}@{self.of.value}{self.fraction:g}"


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


FIRST_PLAN = 0.999
"""A gap that any plan has."""


@dataclass(frozen=True)
class Aim:
    """One line of what is to be reached.

    Attributes:
        seconds: what a solve is given.
        gap: at which it may stop before; `FIRST_PLAN` at its first plan.
        reached: whether a run reached it.
    """

    words: str
    seconds: float
    gap: float
    reached: Callable[[Run], bool]


def _gap(words: str, gap: float, seconds: float, first_s: float = float("inf")) -> Aim:
    """A certified gap in so many seconds, with a plan in the first of them."""

    def reached(run: Run) -> bool:
        return run.gap_at(seconds) <= gap and (run.first_s() or float("inf")) <= first_s

    return Aim(words, seconds, gap / 2, reached)


AIMS: dict[str, Aim] = {
    "training": _gap("training graphs to 1,100 ops, 0.3 to 0.9: within 0.1 %, certified, in 60 s", 0.001, 60),
    "random-0.3": _gap("random graph without a backward pass, 500 ops at 0.75: gap 0.3 % in 60 s", 0.003, 60),
    "random-5": _gap("random graph without a backward pass, 500 ops at 0.65: gap 5 % in 60 s", 0.05, 60),
    "random-0.2": _gap("random graph without a backward pass, 1,000 ops at 0.75: gap 0.2 % in 60 s", 0.002, 60),
    "random-over": Aim(
        "random graph without a backward pass, 1,000 ops at 0.5: at most 55 % over in 60 s",
        60,
        0.0,
        lambda run: (run.cost_at(60) or float("inf")) <= 1.55 * run.total_ns,
    ),
    "known": Aim("random graphs, within 5 % of the least peak known: a plan in 60 s", 60, FIRST_PLAN, Run.settled),
    "pairs": Aim(
        "budgets within 10 % of what is proved necessary: a plan, or a proof of none, in 60 s",
        60,
        FIRST_PLAN,
        Run.settled,
    ),
    "2500": _gap("about 2,500 ops at 0.5: gap 0.1 % in 30 s", 0.001, 30),
    "encoder-decoder": _gap("encoder-decoder transformers, 1,400 to 4,000 ops at 0.5: gap 1 % in 60 s", 0.01, 60),
    "10000": _gap("10,000 ops at 0.5: a plan in 3 s, gap 1 % in 30 s", 0.01, 30, 3),
    "30000": _gap("30,000 ops at 0.5: a plan in 8 s, gap 1 % in 120 s", 0.01, 120, 8),
}
"""What is to be reached, and where, in the order of the table."""


def _spread(aim: str, names: str, fractions: tuple[float, ...], of: Of = Of.PEAK) -> list[Case]:
    return [Case(name, fraction, aim, of) for name in names.split() for fraction in fractions]


CASES: tuple[Case, ...] = (
    # fractions above the working set's, which is 0.50 of gpt-3, 0.58 of gpt-4-whole and 0.32 of gpt-12-whole
    *_spread("training", "vgg-16 resnet-4-whole unet-2 unet-2-whole tape-50 made-unet made-gpt12", (0.75, 0.5)),
    *_spread("training", "gpt-3 gpt-4-whole", (0.75, 0.6)),
    *_spread("training", "made-resnet50 unet-4-whole densenet-12 gpt-12-whole resnet-16-whole", (0.75, 0.5)),
    *_spread("training", "gpt-24 gpt-36 gpt-36-whole resnet-40 resnet-50-whole random-250", (0.75, 0.5)),
    *_spread("training", "made-unet made-gpt12 made-resnet50 resnet-16-whole resnet-40 resnet-50-whole", (0.3,)),
    *_spread("training", "gpt-12-whole random-250", (0.4,)),
    *_spread("random-0.3", "dag-500-s1", (0.75,)),
    *_spread("random-5", "dag-500-s1", (0.65,)),
    *_spread("random-0.2", "dag-1000-s1", (0.75,)),
    *_spread("random-over", "dag-1000-s1", (0.5,)),
    *_spread("known", "dense-100-s1 dense-250-s1 dense-500-s1 dense-1000-s1", (1.05,), Of.KNOWN),
    *_spread("known", "dag-100-s1 dag-250-s1 dag-500-s1 dag-1000-s1 random-125-s1 random-250-s1", (1.05,), Of.KNOWN),
    *_spread("pairs", "made-unet made-gpt12 made-rt100 resnet-4-whole vgg-16 gpt-12-whole", (1.02, 1.08), Of.PAIRS),
    *_spread("pairs", "gpt-36 gpt-160 gpt-330 gpt-430-whole", (1.05,), Of.PAIRS),
    *_spread("2500", "resnet-100 gpt-96-whole gpt-83 random-625-s1", (0.5,)),
    *_spread("encoder-decoder", "bart-large-kernels whisper-small-kernels t5-large-grouped", (0.5,)),
    *_spread("10000", "gpt-330 gpt-430-whole random-2500-s1", (0.5,)),
    *_spread("30000", "gpt-1000", (0.5,)),
)
QUICK = ("made-unet@0.5", "made-gpt12@0.5", "gpt-36@0.5", "vgg-16@0.5", "resnet-4-whole@0.5")


def cases_of(folder: Path) -> list[Case]:
    """Every graph of a folder at 0.75, 0.5 and 0.3."""
    return [Case(path.stem, share, "training") for path in sorted(folder.glob("*.json")) for share in (0.75, 0.5, 0.3)]


def problem_of(case: Case, folders: Sequence[Path]) -> Problem:
    """The case's problem: a file of the first folder that has it, else a graph of RematBench, else a generated one.

    Raises:
        InvalidData: neither exists.
    """
    known = manifest().get(case.name)
    for folder in (*folders, GRAPHS):
        path = folder / f"{case.name}.json"
        if path.exists():
            graph = Graph.from_json(path.read_text())
            break
    else:
        graph = instance(case.name) if known is None else load(case.name).graph
    if case.of is Of.PEAK:
        return Problem(graph, budget_at(graph, case.fraction))
    if case.of is Of.PAIRS and case.fraction < 1:
        raise InvalidData("a budget below what pairs of values need is infeasible at once")
    least = pair_need(graph).least_bytes if known is None or case.of is Of.PAIRS else known["least_known_bytes"]
    return Problem(graph, graph.fixed_bytes + int(case.fraction * (least - graph.fixed_bytes)))
