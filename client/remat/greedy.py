"""The client's own greedy plan, for when there is neither service nor solver: evict under pressure, remake on demand.

The step is walked in op order inside the budget. When memory runs out, the resident value that is cheapest to lose is
freed: cost of remaking it ÷ (bytes · ops until its next use), the heuristic of Dynamic Tensor Rematerialization
(Kirisame et al., Section 2) with the true next use in place of its staleness, since the whole step is known here. A
value that is gone when an op reads it is remade from what is resident, inputs first. `plan_of` then frees every
instance after its last use, and recomputations that fit without are taken out again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from remat_ir import (
    Answer,
    Graph,
    InvalidPlan,
    Plan,
    Problem,
    Progress,
    Status,
    gap_of,
    overhead_of,
    plain_plan,
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
    method: str = "greedy",
) -> Answer:
    """The best of a few greedy walks, verified; or infeasible, where one op alone needs more than the budget.

    Where no walk fits the budget, `least_budget_bytes` of the answer is the least at which one was seen to fit.
    """
    start = time.monotonic()
    graph = problem.graph
    floor_op, floor = least_need(graph)
    if floor > problem.budget_bytes:
        known, _ = _least_fitting(graph, floor, time.monotonic() + LONGEST_LOOK_S)
        why = f"No plan fits: {graph.op_label(floor_op)} alone needs {floor} bytes, "
        why += f"and the budget is {problem.budget_bytes}."
        return _answer(problem, method, Status.INFEASIBLE, start, why, least=known, floor=floor)
    best: Plan | None = None
    best_cost = best_peak = -1
    for plan in _candidates(problem, start + time_limit_s):
        try:
            verdict = verify(problem, plan)
        except InvalidPlan:  # over the budget: a candidate only
            continue
        if best is None or verdict.cost_ns < best_cost:
            best, (best_cost, best_peak) = plan, verdict
            if on_progress is not None:
                on_progress(Progress(time.monotonic() - start, best_cost, graph.total_cost_ns, "greedy", plan))
        if gap_of(best_cost, graph.total_cost_ns) <= max_gap:
            break
    if best is None:
        known, least = _least_fitting(graph, floor, time.monotonic() + LONGEST_LOOK_S)
        if known <= problem.budget_bytes:
            best, (best_cost, best_peak) = least, verify(problem, least)
    if best is None:
        why = f"The greedy plan does not fit {problem.budget_bytes} bytes; it is known to fit {known}."
        return _answer(problem, method, Status.NOTHING_FOUND, start, why, least=known, floor=floor)
    done = best_cost == graph.total_cost_ns
    why = "No plan costs less." if done else "A greedy plan; nothing is proved about it but that it is valid."
    status = Status.OPTIMAL if done else Status.FEASIBLE
    answer = _answer(problem, method, status, start, why, least=best_peak, floor=floor)
    return _with_plan(answer, graph, best, best_cost, best_peak)


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


def least_plan(graph: Graph, *, time_limit_s: float = 10.0) -> Plan:
    """The plan of least peak that the greedy walks find."""
    return _least_fitting(graph, least_need(graph)[1], time.monotonic() + time_limit_s)[1]


def _candidates(problem: Problem, until: float) -> Iterator[Plan]:
    """Plans that may fit: the plain one alone where it does, else one of each walk that comes through."""
    graph, budget = problem.graph, problem.budget_bytes
    plain = plain_plan(graph)
    yield plain
    if max(moment.peak_bytes for moment in replay(graph, plain)) <= budget:
        return
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


def _answer(
    problem: Problem, method: str, status: Status, start: float, message: str, *, least: int, floor: int
) -> Answer:
    return Answer(
        status=status,
        method=method,
        budget_bytes=problem.budget_bytes,
        seconds=round(time.monotonic() - start, 6),
        least_budget_bytes=least,
        least_budget_bound_bytes=floor,
        digest=problem_digest(problem),
        message=message,
    )


def _with_plan(answer: Answer, graph: Graph, plan: Plan, cost_ns: int, peak_bytes: int) -> Answer:
    return replace(
        answer,
        cost_ns=cost_ns,
        bound_ns=graph.total_cost_ns,
        overhead=overhead_of(cost_ns, graph.total_cost_ns),
        gap=gap_of(cost_ns, graph.total_cost_ns),
        peak_bytes=peak_bytes,
        plan=plan,
    )
