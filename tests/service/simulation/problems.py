"""Small problems whose optimum is known, and what a solver says about them: found once, by the solver itself."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from remat_ir import Answer, Plan, Problem, Status, budget_at, graph_of, plain_peak
from remat_solver import solve
from service.serving import hard_graph, training_graph

METHODS = ("staged", "greedy")


@dataclass(frozen=True)
class Known:
    """A problem, a valid plan, and its whole answer with a certificate: optimal, or that no plan fits."""

    problem: Problem
    first: Answer | None
    best: Answer


@functools.cache
def problems() -> tuple[Known, ...]:
    """The problems of every simulation."""
    graphs = [training_graph(3, fixed=7), training_graph(4, cost=130), hard_graph(5, seed=3)]
    budgets = [(plain_peak(graph), budget_at(graph, 0.5) + graph.fixed_bytes) for graph in graphs]
    found = [_known(Problem(graph, at)) for graph, both in zip(graphs, budgets, strict=True) for at in both]
    too_small = graph_of((5, 5, 5), (9, 9, 9), ((), (0,), (0, 1)))
    return (*found, _known(Problem(too_small, 26)))


def _known(problem: Problem) -> Known:
    best = solve(problem, method="staged", max_gap=0.0, time_limit_s=60.0, options={"polish": False})
    if best.status is Status.INFEASIBLE:
        return Known(problem, None, best)
    assert best.status is Status.OPTIMAL, best
    first = solve(problem, method="greedy", max_gap=0.0, time_limit_s=60.0)
    return Known(problem, first, best)


def frames(known: Known, method: str, seconds: float, limit: str | None) -> list[dict[str, Any]]:
    """What a solver child sends: an improvement, then its answer, cut short by a limit where one is named."""
    first, best = known.first, known.best
    if first is None:
        if limit is None:
            return [_answer(replace(best, method=method, seconds=seconds))]
        return [_answer(_nothing(best, method, seconds, limit))]
    told = [_progress(first, seconds / 2)]
    if limit is not None or method == "greedy":
        return [*told, _answer(replace(first, method=method, seconds=seconds, limit=limit))]
    return [*told, _answer(replace(best, method=method, seconds=seconds))]


def lies(known: Known) -> list[dict[str, Any]]:
    """What a solver child with a bug sends: a plan that is none, and a cost that it does not have."""
    if known.first is None or not isinstance(known.first.plan, Plan):
        return []
    steps = known.first.plan.steps[1:]
    return [_progress(replace(known.first, plan=Plan(steps), cost_ns=1), 0.0)]


def _nothing(best: Answer, method: str, seconds: float, limit: str) -> Answer:
    return Answer(Status.NOTHING_FOUND, method, best.budget_bytes, seconds=seconds, limit=limit, digest=best.digest)


def _answer(answer: Answer) -> dict[str, Any]:
    return {"type": "answer", "answer": answer.to_json(), "whole_bound_ns": None}


def _progress(answer: Answer, seconds: float) -> dict[str, Any]:
    said = answer.to_json()
    names = ("cost_ns", "bound_ns", "restricted_to", "plan")
    more = {"seconds": seconds, "whole_bound_ns": None, "source": answer.method, "proof": None}
    return {"type": "progress", **{name: said[name] for name in names}, **more}
