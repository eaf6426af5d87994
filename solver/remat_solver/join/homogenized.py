"""A graph of branches that meet, taken as a join of equal steps: the join's optimal plan as a plan of the graph."""

from __future__ import annotations

from remat_ir import Plan, Problem, verify
from remat_ir.branches import Branches, branches_of
from remat_ir.errors import InvalidPlan

from ..incumbent import Incumbent
from .table import JoinTable, states

MOST_WORK = 1e9
"""Comparisons that the join program may take beside the general solver: about a second."""


def offer_homogenized(incumbent: Incumbent) -> bool:
    """Offer the join plan of the homogenized instance, with as many slots as fit in bytes; whether there is one.

    Where the branches are heterogeneous, nothing is proved by it, and the answer says so.
    """
    found = branches_of(incumbent.problem.graph)
    if found is None:
        return False
    plan = homogenized_plan(found, incumbent.problem)
    if plan is None:
        return False
    better = incumbent.offer(plan, "homogenized-join")
    equal = "equal" if found.homogeneous else "heterogeneous"
    lengths = ", ".join(map(str, found.lengths))
    incumbent.note(
        f"Branches of {lengths} {equal} stages meet here: the join plan of the homogenized instance was one incumbent"
        + ("." if better else ", and not the best.")
    )
    return True


def homogenized_plan(found: Branches, problem: Problem) -> Plan | None:
    """The cheapest plan that fits the problem, of those that are optimal for the join in some number of slots."""
    lengths = found.lengths
    slots = sum(lengths) + len(lengths) + 1
    if states(lengths, slots) * sum(lengths) > MOST_WORK:
        return None
    table = JoinTable(lengths, slots)
    best: tuple[int, Plan] | None = None
    for count in range(slots, 0, -1):
        steps = table.plan(count)
        if steps is None:
            break
        plan = found.plan(steps)
        try:
            cost = verify(problem, plan).cost_ns
        except InvalidPlan:
            continue
        if best is None or cost < best[0]:
            best = (cost, plan)
    return None if best is None else best[1]
