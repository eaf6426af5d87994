"""Answers without a solver: the client's own greedy plan, and the plan of another size of the same step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from remat_ir import (
    Answer,
    AnyPlan,
    Chain,
    Graph,
    InvalidPlan,
    Join,
    Plan,
    Problem,
    Progress,
    Status,
    Subject,
    gap_of,
    greedy_plans,
    least_memory,
    lowered_plan,
    optimal_sentence,
    peak_of,
    plain_peak,
    plain_plan_of,
    problem_digest,
    readable,
    verify,
    working_set,
)

LONGEST_LOOK_S = 3.0
"""Seconds spent on finding a budget that is enough, once the one asked for is not."""


def greedy_answer(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    max_gap: float = 0.001,
    on_progress: Callable[[Progress], None] | None = None,
    look_s: float = LONGEST_LOOK_S,
) -> Answer:
    """The best of a few greedy walks, verified; or infeasible, where one op alone needs more than the budget.

    A chain is walked as the graph that it lifts to, without its link; a join has its plain plan or none. Where no walk
    fits the budget, `least_budget_bytes` of the answer is the least at which one was seen to fit, looked for during
    `look_s` seconds.
    """
    start = time.monotonic()
    subject = problem.subject
    if isinstance(subject, Join):
        looked = Looked(_judged(problem, plain_plan_of(subject), None), plain_peak(subject), 0)
    else:

        def tell(found: Found) -> None:
            if on_progress is not None:
                bound = subject.total_cost_ns
                on_progress(Progress(time.monotonic() - start, found.cost_ns, bound, "greedy", found.plan))

        looked = _walked(problem, subject, max_gap, tell, until=start + time_limit_s, look_s=look_s)
    best = looked.best
    if best is None:
        known = readable(looked.known, up=True)
        tight = f"The greedy plan does not fit {readable(problem.budget_bytes)}; {known} is known to be enough."
        return Answer(
            Status.INFEASIBLE if looked.reason else Status.NOTHING_FOUND,
            "greedy",
            problem.budget_bytes,
            seconds=round(time.monotonic() - start, 6),
            least_budget_bytes=looked.known,
            least_budget_bound_bytes=looked.floor,
            digest=problem_digest(problem),
            message=looked.reason or tight,
        )
    free = best.cost_ns == subject.total_cost_ns
    return Answer.of_plan(
        problem,
        best.plan,
        method="greedy",
        seconds=round(time.monotonic() - start, 6),
        least_budget_bytes=best.peak_bytes,
        least_budget_bound_bytes=looked.floor,
        message=optimal_sentence(()) if free else "A greedy plan; nothing is proved about it but that it is valid.",
    )


class Found(NamedTuple):
    """A plan that the verifier has passed."""

    plan: AnyPlan
    cost_ns: int
    peak_bytes: int


class Looked(NamedTuple):
    """What the walks found: the best plan, a budget known to be enough, one needed at least, and why none can fit."""

    best: Found | None
    known: int
    floor: int
    reason: str = ""


def _walked(
    problem: Problem,
    subject: Graph | Chain,
    max_gap: float,
    tell: Callable[[Found], None],
    *,
    until: float,
    look_s: float,
) -> Looked:
    """The best of the walks through a graph, or through the graph that a chain lifts to."""
    graph = subject.to_graph() if isinstance(subject, Chain) else subject
    op, floor = working_set(graph)
    if isinstance(subject, Chain) and subject.link_bytes_per_s is not None:
        floor = 0  # what is offloaded needs no memory here: the lift's floor is none of the chain's
    if floor > problem.budget_bytes:
        known = peak_of(graph, _least(graph, look_s))
        needs, given = readable(floor), readable(problem.budget_bytes)
        why = f"No plan fits: {graph.op_label(op)} alone needs {needs}; the budget is {given}."
        return Looked(None, known, floor, why)
    best: Found | None = None
    for plan in greedy_plans(graph, problem.budget_bytes, stop=lambda: time.monotonic() > until, patient=True):
        better = _judged(problem, _returned(subject, plan), best)
        if better is not None and better is not best:
            best = better
            tell(best)
        if best is not None and gap_of(best.cost_ns, subject.total_cost_ns) <= max_gap:
            break
    known = problem.budget_bytes
    if best is None:
        least = _least(graph, look_s)
        known = peak_of(graph, least)
        best = _judged(problem, _returned(subject, least), best)
    return Looked(best, known, floor)


def _judged(problem: Problem, plan: AnyPlan, best: Found | None) -> Found | None:
    """The plan, if it fits and is cheaper than the best."""
    try:
        verdict = verify(problem, plan)
    except InvalidPlan:  # over the budget: a candidate only
        return best
    return best if best is not None and best.cost_ns <= verdict.cost_ns else Found(plan, *verdict)


def _returned(subject: Graph | Chain, plan: Plan) -> AnyPlan:
    """A plan of the walked graph in the form of the subject that it stands for."""
    return lowered_plan(subject, plan.computes) if isinstance(subject, Chain) else plan


def _least(graph: Graph, seconds: float) -> Plan:
    """The plan of the least peak that the walks find in so many seconds, and one round of them in any case."""
    until = time.monotonic() + seconds
    return least_memory(graph, stop=lambda: time.monotonic() > until)


MOST_TRIED = 8
"""Of the plans that a module has, the latest."""

Known: TypeAlias = tuple[Subject, Answer]
"""A graph or chain that was planned, and the answer that it has."""


def same_structure(one: Subject, other: Subject) -> bool:
    """Whether two subjects have the same ops and values, whatever they cost and weigh: a plan of one is one of both."""
    return _structure(one) == _structure(other)


def plan_of_another_size(problem: Problem, known: Sequence[Known]) -> Answer | None:
    """The cheapest known plan of the same structure that the verifier passes on this problem, as an answer to it.

    Args:
        known: the latest last.
    """
    best: Answer | None = None
    for subject, answer in list(reversed(known))[:MOST_TRIED]:
        if answer.plan is None or not same_structure(problem.subject, subject):
            continue
        try:
            found = Answer.of_plan(
                problem,
                answer.plan,
                method=answer.method,
                cache="near",
                message="The plan of another size of this step, verified on this one.",
            )
        except InvalidPlan:  # over the budget at this size
            continue
        if best is None or (found.cost_ns or 0) < (best.cost_ns or 0):
            best = found
    return best


def _structure(subject: Subject) -> tuple[object, ...]:
    if isinstance(subject, Chain):
        return ("chain", subject.stages, subject.link_bytes_per_s is None)
    if not isinstance(subject, Graph):
        return (subject,)
    sets = (subject.optional, subject.once, subject.keep, subject.consumes)
    return (subject.op_inputs, subject.value_op, *sets, subject.backward_from)
