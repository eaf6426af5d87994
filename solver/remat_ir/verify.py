"""The one verifier: nothing is stored, served or executed that has not passed here, on the original problem."""

from __future__ import annotations

from typing import NamedTuple

from .errors import InvalidPlan
from .problem import AnyPlan, Problem, Subject, replay_any
from .words import readable


class Verdict(NamedTuple):
    """What a plan that passed costs, in ns, and its peak, in bytes, fixed bytes included."""

    cost_ns: int
    peak_bytes: int


def verify(problem: Problem, plan: AnyPlan, *, cost_ns: int | None = None, peak_bytes: int | None = None) -> Verdict:
    """Replay a plan on its problem: its cost (with a link its makespan) and peak, or the first reason why it is wrong.

    `cost_ns` and `peak_bytes` are what an answer claims; they must be what the replay finds. Linear in the plan. A
    join's peak must also fit its slots.

    Raises:
        InvalidPlan: the first rule that is broken, with its step.

    Example:
        >>> from remat_ir import graph_of, plain_plan
        >>> graph = graph_of([1, 2], [4, 8], [[], [0]])
        >>> verify(Problem(graph, 12), plain_plan(graph))
        Verdict(cost_ns=3, peak_bytes=12)
    """
    subject, limit = problem.subject, problem.capacity_bytes
    cost, peak = 0, subject.fixed_bytes
    for moment in replay_any(subject, plan):
        if moment.peak_bytes > limit:
            over = f"{readable(moment.peak_bytes - limit)} over the budget of {readable(limit)}"
            raise InvalidPlan(f"memory is {readable(moment.peak_bytes)}, {over}", moment.step)
        if moment.peak_bytes > peak:
            peak = moment.peak_bytes
        cost = moment.cost_ns
    if cost_ns is not None and cost_ns != cost:
        raise InvalidPlan(f"the claimed cost is {cost_ns} ns, the replayed one {cost} ns")
    if peak_bytes is not None and peak_bytes != peak:
        raise InvalidPlan(f"the claimed peak is {peak_bytes} bytes, the replayed one {peak}")
    return Verdict(cost, peak)


def host_peak(subject: Subject, plan: AnyPlan) -> int:
    """The most bytes that a plan holds on the host.

    Raises:
        InvalidPlan: the plan breaks a rule, apart from a budget.
    """
    return max((moment.host_bytes for moment in replay_any(subject, plan)), default=0)
