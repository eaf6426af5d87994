"""The least budget as a method: plans of ever smaller peaks, and certificates of what every plan needs."""

from __future__ import annotations

from remat_ir import Progress, certificate_for, plain_peak, plain_plan

from ..incumbent import Incumbent

_UNLIMITED_S = 600.0
"""Seconds for the two sides to meet where there is no time limit."""


def run_least(incumbent: Incumbent, options: object = None) -> None:
    """Narrow down the least budget from both sides until they meet or the time is up; what fits is offered on the way.

    What the answer says of budgets is about every budget; its plan is the cheapest one found that fits this one.
    """
    from ..least import METHOD, least_budget  # it solves problems of its own, by methods

    problem, graph = incumbent.problem, incumbent.problem.graph

    def take(news: Progress) -> None:
        if news.plan is not None:
            incumbent.offer_or_suffices(news.plan, METHOD)

    seconds = min(incumbent.deadline.remaining(), _UNLIMITED_S)
    found = least_budget(graph, time_limit_s=seconds, on_progress=take, cancelled=incumbent.stopped)
    if plain_peak(graph) <= problem.budget_bytes:
        incumbent.offer(plain_plan(graph), METHOD)
    if found.least_budget_bytes is not None:
        incumbent.suffices(found.least_budget_bytes)
    least = found.least_budget_bound_bytes or 0
    incumbent.needs_at_least(least, found.proof)
    if least > problem.budget_bytes:
        proof = None if found.proof is None else certificate_for(problem, found.proof).proof
        reason = f"No plan fits: every plan needs at least {least} bytes, and the budget is {problem.budget_bytes}."
        incumbent.prove_infeasible(reason, least, proof)
    elif incumbent.plan is None:
        incumbent.ends_without_plan(found.message)
