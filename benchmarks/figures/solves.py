"""What the figures solve: which methods, at which budgets, and the row of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from remat_ir import Answer, Graph, Problem, plain_peak
from remat_ir.working_set import working_set
from remat_solver import solve, sweep
from remat_solver.baselines.shape import linear

Row: TypeAlias = dict[str, Any]

ON_LINEAR = ("griewank", "chen-sqrt", "chen-greedy")
ON_OTHERS = ("ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy")
BEST = "auto"


class Settings(NamedTuple):
    """Seconds for one solve, budgets per network, and the methods and networks to measure, None for all."""

    seconds: float
    points: int
    methods: frozenset[str] | None = None
    networks: frozenset[str] | None = None

    def wants(self, network: str, method: str) -> bool:
        """Whether a method is to be measured on a network."""
        return (self.networks is None or network in self.networks) and (self.methods is None or method in self.methods)

    def wanted(self, network: str, methods: Iterable[str]) -> list[str]:
        """Those of the methods that are to be measured on a network."""
        return [method for method in methods if self.wants(network, method)]


def budgets_of(graph: Graph, points: int) -> list[int]:
    """Budgets spread evenly from the least that any op needs to the plain peak."""
    least, most = working_set(graph).least_bytes, plain_peak(graph)
    return sorted({least + (most - least) * i // (points - 1) for i in range(points)})


def baselines_of(graph: Graph) -> tuple[str, ...]:
    """Chen's and Griewank's methods on a linear graph, where the generalizations are the same; those on others."""
    assert graph.backward_from is not None
    return ON_LINEAR if linear(graph, graph.backward_from) else ON_OTHERS


def answers(graph: Graph, budgets: Sequence[int], methods: Iterable[str], seconds: float) -> Iterator[Answer]:
    """Each method's answer at each budget; those of auto help one another."""
    for method in methods:
        if method == BEST:
            yield from sweep(graph, budgets, method=BEST, time_limit_s=seconds)
            continue
        for budget in budgets:
            yield solve(Problem(graph, budget), method=method, time_limit_s=seconds)


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
    }
