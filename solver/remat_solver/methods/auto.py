"""Auto: bounds, then a plan at once, then search and proof until the gap, the time or the caller says stop."""

from __future__ import annotations

from remat_ir import Graph, plain_peak, plain_plan, replay

from ..incumbent import Incumbent
from ..search.greedy import greedy, least_memory
from .structured import run_linear, run_structured


def run_auto(incumbent: Incumbent, options: object = None) -> None:
    """Combine the methods; anytime: every improvement is offered as soon as it is found."""
    if not isinstance(incumbent.problem.subject, Graph):
        run_structured(incumbent, run_auto)
        return
    if _keep_everything(incumbent):
        return
    run_linear(incumbent)
    _first_plan(incumbent)


def _keep_everything(incumbent: Incumbent) -> bool:
    """Whether the plain plan fits: then it is optimal, since every plan runs every op at least once."""
    graph = incumbent.problem.graph
    peak = plain_peak(graph)
    incumbent.suffices(peak)
    if peak > incumbent.problem.budget_bytes:
        return False
    incumbent.offer(plain_plan(graph), "checkpoint-all")
    return True


def _first_plan(incumbent: Incumbent) -> None:
    """A plan at once: by eviction, and where that fails by looking for the least memory."""
    problem = incumbent.problem
    plan = greedy(problem.graph, problem.budget_bytes, deadline=incumbent.deadline)
    if plan is not None:
        incumbent.offer(plan, "greedy")
        return
    plan = least_memory(problem.graph, deadline=incumbent.deadline)
    peak = max(moment.peak_bytes for moment in replay(problem.graph, plan))
    incumbent.suffices(peak)
    if peak <= problem.budget_bytes:
        incumbent.offer(plan, "least-memory")
