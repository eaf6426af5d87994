"""What the figures solve: which methods, at which budgets, for how long, in which pieces, and the row of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from remat_ir import Answer, Graph, Problem, plain_peak
from remat_ir.working_set import working_set
from remat_solver import solve, sweep
from remat_solver.baselines.heuristics import BASELINES, BaselineOptions, linear

Row: TypeAlias = dict[str, Any]

ON_LINEAR = ("griewank", "chen-sqrt", "chen-greedy")
ON_OTHERS = ("ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy")
FORMULAS = ("checkpoint-all", *ON_LINEAR, *ON_OTHERS)
"""Methods that solve nothing, and take seconds."""
BEST = "auto"
PROGRAMS = ("milp", "milp-tight", "lp-rounding")
"""Methods that hand the paper's program, or one of the same space, to an engine, which runs on one core."""


class Settings(NamedTuple):
    """Seconds of each kind of solve, budgets a network, and the methods and networks to measure, None for all.

    Attributes:
        seconds: of a solve by `auto`, which runs on two cores.
        program_s: of a solve of the paper's program, or of its relaxation.
        long_s: of the paper's program for ResNet50 (Checkmate, Section 5.1: 3,600 s).
    """

    seconds: float = 30.0
    points: int = 6
    methods: frozenset[str] | None = None
    networks: frozenset[str] | None = None
    program_s: float = 600.0
    long_s: float = 3600.0

    def wants(self, network: str, method: str) -> bool:
        """Whether a method is to be measured on a network."""
        return (self.networks is None or network in self.networks) and (self.methods is None or method in self.methods)

    def limit_s(self, method: str) -> float:
        """The time limit of one solve."""
        return self.program_s if method in PROGRAMS else self.seconds


class Piece(NamedTuple):
    """A part of a measurement that is run and kept by itself: one solve, or solves that help one another.

    Attributes:
        part: what tells it from others of the same network and method.
        limit_s: the most that its solves may take.
        cores: how many it keeps busy.
        rows: runs it.
    """

    network: str
    method: str
    part: str
    limit_s: float
    cores: int
    rows: Callable[[], Iterable[Row]]

    @property
    def name(self) -> str:
        """For a file and the command line."""
        return "-".join(filter(None, (self.network, self.method, self.part)))


def budgets_of(graph: Graph, points: int) -> list[int]:
    """Budgets spread evenly from the least that any op needs to the plain peak."""
    least, most = working_set(graph).least_bytes, plain_peak(graph)
    return sorted({least + (most - least) * i // (points - 1) for i in range(points)})


def baselines_of(graph: Graph) -> tuple[str, ...]:
    """Chen's and Griewank's methods on a linear graph, where the generalizations are the same; those on others."""
    assert graph.backward_from is not None
    return ON_LINEAR if linear(graph, graph.backward_from) else ON_OTHERS


def accountings(method: str) -> tuple[str, ...]:
    """The ways to count a method's memory: a baseline's as its paper does, too, where that is another."""
    return ("", "paper") if method in BASELINES and BASELINES[method].options is BaselineOptions else ("",)


def options_for(freeing: str) -> Mapping[str, object]:
    """The options of one way to count."""
    return {"freeing": freeing} if freeing else {}


def answers(graph: Graph, budgets: Sequence[int], method: str, seconds: float, freeing: str = "") -> Iterable[Answer]:
    """A method's answer at each budget; those of auto help one another."""
    if method == BEST:
        return sweep(graph, budgets, method=BEST, time_limit_s=seconds)
    return (
        solve(Problem(graph, budget), method=method, time_limit_s=seconds, options=options_for(freeing))
        for budget in budgets
    )


def pieces_of(
    plan: Settings, name: str, batch: int, graph: Graph, budgets: Sequence[int], methods: Iterable[str]
) -> Iterable[Piece]:
    """A piece for each method, of a program one for each budget."""
    for method in methods:
        groups = [[budget] for budget in budgets] if method in PROGRAMS else [list(budgets)]
        for at, some in enumerate(groups):
            part, limit_s = str(at) if len(groups) > 1 else "", plan.limit_s(method)
            rows = partial(_rows, name, batch, graph, some, method, limit_s)
            most_s = limit_s if method in FORMULAS else len(some) * limit_s
            yield Piece(name, method, part, most_s, 2 if method == BEST else 1, rows)


def _rows(name: str, batch: int, graph: Graph, budgets: Sequence[int], method: str, limit_s: float) -> Iterable[Row]:
    for freeing in accountings(method):
        for answer in answers(graph, budgets, method, limit_s, freeing):
            yield {**row_of(name, batch, graph, answer), "freeing": freeing, "limit_s": limit_s}


def row_of(name: str, batch: int, graph: Graph, answer: Answer) -> Row:
    """What a file holds of an answer."""
    return {
        "network": name,
        "batch": batch,
        "ops": graph.ops,
        "method": answer.method,
        "budget_bytes": answer.budget_bytes,
        "status": answer.status.value,
        "cost": "" if answer.cost_ns is None else answer.cost_ns,
        "bound": "" if answer.bound_ns is None else answer.bound_ns,
        "once": graph.total_cost_ns,
        "peak_bytes": "" if answer.peak_bytes is None else answer.peak_bytes,
        "restricted_to": " ".join(answer.restricted_to),
        "seconds": round(answer.seconds, 3),
        "ended": answer.limit or "",
    }
