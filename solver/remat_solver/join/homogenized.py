"""A graph of branches that meet, taken as a join of equal steps: the join's optimal plan as a plan of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from remat_ir import Graph, Join, JoinPlan, Plan, Problem, Subject, verify
from remat_ir.branches import Branches, branches_of
from remat_ir.errors import InvalidPlan

from ..incumbent import Incumbent
from ..reduction import Reduction
from .table import JoinTable, states

MOST_WORK = 1e9
"""Comparisons that the join program may take next to the general solver: about a second."""


@dataclass(frozen=True)
class Homogenized(Reduction[JoinPlan]):
    """A graph of branches that meet as a join of equal steps, with slots for everything."""

    branches: Branches

    @classmethod
    def apply(cls, subject: Subject) -> Homogenized | None:
        """The join of a graph whose branches meet, or None."""
        found = branches_of(subject) if isinstance(subject, Graph) else None
        return None if found is None else cls(found)

    @property
    def join(self) -> Join:
        """The join."""
        lengths = self.branches.lengths
        return self.branches.homogenized(sum(lengths) + len(lengths) + 1)

    @property
    def within(self) -> None:
        """Steps that differ are taken as equal, so nothing is proved."""
        return None

    def invert(self, plan: JoinPlan) -> Plan:
        """The steps of a join plan on the graph's ops; whether they fit is the verifier's to say."""
        return self.branches.plan(plan)


def offer_homogenized(incumbent: Incumbent) -> bool:
    """Offer the join plan of the homogenized instance, with as many slots as fit in bytes; whether there is one.

    Where the branches are heterogeneous, nothing is proved by it, and the answer says so.
    """
    taken = Homogenized.apply(incumbent.problem.graph)
    if taken is None:
        return False
    plan, found = homogenized_plan(taken, incumbent.problem), taken.branches
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


def homogenized_plan(taken: Homogenized, problem: Problem) -> Plan | None:
    """The cheapest plan that fits the problem, of those that are optimal for the join in some number of slots."""
    join = taken.join
    lengths, slots = join.lengths, join.slots
    if states(lengths, slots) * sum(lengths) > MOST_WORK:
        return None
    table = JoinTable(lengths, slots)
    best: tuple[int, Plan] | None = None
    for count in range(slots, 0, -1):
        steps = table.plan(count)
        if steps is None:
            break
        plan = taken.invert(steps)
        try:
            cost = verify(problem, plan).cost_ns
        except InvalidPlan:
            continue
        if best is None or cost < best[0]:
            best = (cost, plan)
    return None if best is None else best[1]
