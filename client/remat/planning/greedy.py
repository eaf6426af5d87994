"""The client's own greedy plan, for when there is neither service nor solver: evict under pressure, remake on demand.

The step is walked in op order inside the budget. When memory runs out, the resident value that is cheapest to lose is
freed: cost of remaking it ÷ (bytes · ops until its next use), the heuristic of Dynamic Tensor Rematerialization
(Kirisame et al., Section 2) with the true next use in place of its staleness, since the whole step is known here. A
value that is gone when an op reads it is remade from what is resident, inputs first. `plan_of` then frees every
instance after its last use, and recomputations that fit without are taken out again. Where it fits, the plan that
computes the whole forward pass once more is tried, too, less what need not be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

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
    gap_of,
    lowered_plan,
    plain_peak,
    plain_plan,
    plain_plan_of,
    plan_of,
    problem_digest,
    replay,
    verify,
)

from .walk import Stuck, Taste, Walk, without_needless

LONGEST_LOOK_S = 3.0
"""Seconds spent on finding a budget that would do, once the one asked for does not."""


TASTES = (Taste(1, 1, 0.5), Taste(1, 1, 0), Taste(1, 1, 1), Taste(1, 0.5, 0.5), Taste(0.5, 1, 1))


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
        why = (
            looked.reason
            or f"The greedy plan does not fit {problem.budget_bytes} bytes; {looked.known} are known to do."
        )
        status = Status.INFEASIBLE if looked.reason else Status.NOTHING_FOUND
        return _answer(problem, status, start, why, least=looked.known, floor=looked.floor)
    done = best.cost_ns == subject.total_cost_ns
    why = "No plan costs less." if done else "A greedy plan; nothing is proved about it but that it is valid."
    status = Status.OPTIMAL if done else Status.FEASIBLE
    return replace(
        _answer(problem, status, start, why, least=best.peak_bytes, floor=looked.floor),
        plan=best.plan,
    ).priced(subject.total_cost_ns, best.cost_ns, subject.total_cost_ns, best.peak_bytes)


class Found(NamedTuple):
    """A plan that the judge has passed."""

    plan: AnyPlan
    cost_ns: int
    peak_bytes: int


class Looked(NamedTuple):
    """What the walks came to: the best plan, a budget known to do, one needed at least, and why none can fit."""

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
    op, floor = least_need(graph)
    if isinstance(subject, Chain) and subject.link_bytes_per_s is not None:
        floor = 0  # what is offloaded needs no memory here: the lift's floor is none of the chain's
    if floor > problem.budget_bytes:
        known, _ = _least_fitting(graph, floor, time.monotonic() + look_s)
        why = f"No plan fits: {graph.op_label(op)} alone needs {floor} bytes, and the budget is {problem.budget_bytes}."
        return Looked(None, known, floor, why)
    best: Found | None = None
    for plan in _candidates(graph, problem.budget_bytes, until):
        better = _judged(problem, _returned(subject, plan), best)
        if better is not None and better is not best:
            best = better
            tell(best)
        if best is not None and gap_of(best.cost_ns, subject.total_cost_ns) <= max_gap:
            break
    known = problem.budget_bytes
    if best is None:
        known, least = _least_fitting(graph, floor, time.monotonic() + look_s)
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


def least_need(graph: Graph) -> tuple[int, int]:
    """The op whose inputs, outputs and workspace alone need the most bytes, and those bytes, fixed ones included.

    Kept values of earlier ops are there too: a lower bound on every budget that suffices.
    """
    keep, sizes = frozenset(graph.keep), graph.value_bytes
    kept_bytes, worst = 0, (0, -1)
    for op in range(graph.ops):
        need = graph.fixed_bytes + kept_bytes + graph.op_workspace_bytes[op]
        need += sum(sizes[v] for v in graph.op_inputs[op] if v not in keep)
        need += sum(sizes[v] for v in graph.op_always[op])
        if need > worst[1]:
            worst = (op, need)
        kept_bytes += sum(sizes[v] for v in graph.op_values[op] if v in keep)
    return worst


def checkpointed(graph: Graph) -> Plan:
    """The plan that computes the forward pass once more when the backward pass begins, and holds what it cannot.

    Of a graph without a backward pass it is the plain plan.
    """
    turn = graph.backward_from
    if turn is None:
        return plain_plan(graph)
    pinned = set(graph.once) | {graph.value_op[v] for v in graph.keep}
    again: set[int] = set()
    stack = [v for op in range(turn, graph.ops) for v in graph.op_inputs[op]]
    while stack:
        maker = graph.value_op[stack.pop()]
        if maker < turn and maker not in pinned and maker not in again:
            again.add(maker)
            stack.extend(graph.op_inputs[maker])
    return plan_of(graph, (*range(turn + 1), *sorted(again), *range(turn + 1, graph.ops)))


def _candidates(graph: Graph, budget: int, until: float) -> Iterator[Plan]:
    """Plans that may fit: the plain one alone where it does, else one of each walk that comes through."""
    plain = plain_plan(graph)
    yield plain
    if max(moment.peak_bytes for moment in replay(graph, plain)) <= budget:
        return
    again = checkpointed(graph)
    if max(moment.peak_bytes for moment in replay(graph, again)) <= budget:
        yield plan_of(graph, without_needless(graph, list(again.computes), budget))
    found = False
    for limit in (budget, *(budget - budget * k // 64 for k in (1, 2, 4))):
        for taste in TASTES:
            if time.monotonic() > until:
                return
            with suppress(Stuck):
                yield plan_of(graph, without_needless(graph, Walk(graph, limit, taste).run(), budget))
                found = True
        if found:
            return


def _least_fitting(graph: Graph, low: int, until: float) -> tuple[int, Plan]:
    """By bisection between `low` and the plain peak: a budget at which a walk was seen to fit, and its plan."""
    plan = plain_plan(graph)
    high = max(moment.peak_bytes for moment in replay(graph, plan))
    for _ in range(12):
        if high - low <= high // 200 or time.monotonic() > until:
            break
        middle = (low + high) // 2
        found = _any_fitting(graph, middle)
        if found is None:
            low = middle
        else:
            plan = found
            high = max(moment.peak_bytes for moment in replay(graph, plan))
    return high, plan


def _any_fitting(graph: Graph, budget: int) -> Plan | None:
    for taste in TASTES:
        try:
            return plan_of(graph, Walk(graph, budget, taste).run())
        except Stuck:
            continue
    return None


def _answer(problem: Problem, status: Status, start: float, message: str, *, least: int, floor: int) -> Answer:
    return Answer(
        status=status,
        method="greedy",
        budget_bytes=problem.budget_bytes,
        seconds=round(time.monotonic() - start, 6),
        least_budget_bytes=least,
        least_budget_bound_bytes=floor,
        digest=problem_digest(problem),
        message=message,
    )
