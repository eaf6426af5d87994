"""The search on a chain with a link: sequences of its lift to a graph, whose copies are placed as chains have them.

A chain moves what is stored at a cut as one: a tape, or else an activation. So a sequence of the lift is lowered to the
steps of a chain plan, and what each of them stores is a value of one more graph, in which every step runs once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from remat_ir import (
    AnyPlan,
    Chain,
    ChainPlan,
    ChainStep,
    Problem,
    Verb,
    lifted_plan,
    lowered_plan,
    verify,
)

from ..incumbent import Incumbent
from ..placement import INPUT, Gap, Placed, Timetable, moved_plan, stored_graph, timetable
from .search import TransferSearch


class LinkedLift(Incumbent):
    """The incumbent of a chain's lift with its link. Nothing is passed on to the chain's but what closes it.

    Copies of a tape are rounded up to whole ns value by value there, so a bound of the lift is not quite the chain's.
    """

    def __init__(self, outer: Incumbent) -> None:
        chain = outer.problem.subject
        assert isinstance(chain, Chain)
        problem = Problem(chain.to_graph().with_link(chain.link), outer.problem.budget_bytes)
        super().__init__(problem, outer.deadline, outer.max_gap)
        self.outer = outer

    def stopped(self) -> bool:
        """Whether there is a reason to stop, here or on the chain."""
        return super().stopped() or self.outer.stopped()

    def close(self) -> None:
        """Have everybody who works on the chain stop."""
        super().close()
        self.outer.close()


class ChainTransferSearch(TransferSearch):
    """The search on the incumbent of a chain with a link."""

    def __init__(self, incumbent: Incumbent, seed: int = 0) -> None:
        super().__init__(incumbent, seed, LinkedLift(incumbent))
        chain = incumbent.problem.subject
        assert isinstance(chain, Chain)
        self.chain = chain
        self._stored: tuple[ChainStep, ...] = ()

    def adopt(self, plan: AnyPlan) -> None:
        """Go on from a plan of the chain or its lift, if it is the best, with its copies placed anew."""
        if isinstance(plan, ChainPlan):
            plan = lifted_plan(self.chain, ChainPlan(tuple(step for step in plan.steps if step.stage)))
        super().adopt(plan)

    def table(self, order: Sequence[int]) -> Timetable:
        """What is stored when, of the chain plan with these computations."""
        steps = lowered_plan(self.chain, order).steps
        first = (INPUT,) if self.chain.input_may_leave else ()
        self._stored = (*first, *(step for step in steps if step.verb is not Verb.FREE))
        return timetable(stored_graph(self.chain, self._stored), range(len(self._stored)))

    def values_of(self, gap: Gap) -> Collection[int]:
        """The values of the lift that are stored there; none of a gradient, which stays, or of the input."""
        verb, stage = self._stored[gap.value]
        if verb is Verb.B or not stage:
            return ()
        values = self.chain.stage_values(stage)
        return values if verb is Verb.F_ALL else values[:1]

    def may_move(self, gap: Gap, allowed: Collection[int]) -> bool:
        """Whether a gap may be spent on the host: also of an input that may leave, which no set has."""
        return self._stored[gap.value] == INPUT or super().may_move(gap, allowed)

    def planned(self, table: Timetable, found: Placed) -> tuple[int, AnyPlan]:
        """The chain plan and its makespan."""
        plan = moved_plan(self._stored, found.plan)
        return verify(self.incumbent.problem, plan).cost_ns, plan
