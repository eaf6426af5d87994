"""The methods for join networks: the optimal program, and the equivalent chain."""

from __future__ import annotations

from remat_ir import Join, Problem

from ..incumbent import Incumbent
from .equivalent import equivalent_plan
from .table import JoinTable


def usable_slots(problem: Problem) -> int:
    """The slots that a join may fill: its own, as far as the budget pays for them."""
    subject = problem.subject
    assert isinstance(subject, Join)
    return min(subject.slots, problem.budget_bytes // subject.slot_bytes)


def join(incumbent: Incumbent, options: object = None) -> None:
    """Offer an optimal schedule and its cost as the bound (RR-9273, Theorem 3)."""
    subject = incumbent.problem.subject
    assert isinstance(subject, Join)
    slots = usable_slots(incumbent.problem)
    try:
        table = JoinTable(subject.lengths, slots)
    except ValueError as error:
        incumbent.ends_without_plan(f"No plan: {error}.")
        return
    plan = table.plan(slots)
    if plan is None:
        incumbent.prove_infeasible(f"No schedule fits {slots} slots.")
        return
    incumbent.offer(plan, "join")
    forward = (table.forward_steps(slots) or 0) - sum(subject.lengths)
    incumbent.raise_bound(subject.total_cost_ns + forward * subject.forward_ns, "join")


def equiv_chain(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan of the equivalent chain: a baseline."""
    subject = incumbent.problem.subject
    assert isinstance(subject, Join)
    slots = usable_slots(incumbent.problem)
    plan = equivalent_plan(subject.lengths, slots)
    if plan is None:
        incumbent.ends_without_plan(f"The equivalent chain does not fit {slots} slots.")
    else:
        incumbent.offer(plan, "equiv-chain")
