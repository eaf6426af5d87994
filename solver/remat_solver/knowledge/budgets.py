"""What is known about a subject at every budget: the least cost never rises with the budget."""

from __future__ import annotations

from remat_ir import Answer, AnyPlan, Problem, Status, Subject, Verdict

from .known import Bound, Known


class Knowledge:
    """Plans by their peaks, bounds by their budgets, and the budgets that are too small, for one subject.

    A plan serves every budget from its peak on. A bound over the whole space holds at every smaller budget, where fewer
    plans fit. A budget that holds no plan is above every smaller one.

    Args:
        least_bytes: a budget that every plan is known to need.
    """

    def __init__(self, subject: Subject, least_bytes: int = 0) -> None:
        self.subject, self.least_bytes = subject, least_bytes
        self.plans: list[tuple[Verdict, AnyPlan]] = []
        self._bounds: list[tuple[int, int]] = []  # (budget, bound over the whole space)

    def add(self, answer: Answer) -> None:
        """Take over what an answer found and proved; of restricted bounds, nothing."""
        if answer.plan is not None and answer.peak_bytes is not None and answer.cost_ns is not None:
            self.plans.append((Verdict(answer.cost_ns, answer.peak_bytes), answer.plan))
        if answer.bound_ns is not None and not answer.restricted_to:
            self.bounded(answer.budget_bytes, answer.bound_ns)
        if answer.status is Status.INFEASIBLE and not self.infeasible(answer.budget_bytes):
            self.least_bytes = answer.budget_bytes + 1
        self.least_bytes = max(self.least_bytes, answer.least_budget_bound_bytes or 0)

    def bounded(self, budget_bytes: int, bound_ns: int) -> None:
        """Record a bound on the cost of every plan within a budget."""
        self._bounds.append((budget_bytes, bound_ns))

    def best(self, budget_bytes: int) -> tuple[int, AnyPlan] | None:
        """The cheapest known plan within a budget, with its cost."""
        known = self.at(budget_bytes)
        return None if known.plan is None or known.cost_ns is None else (known.cost_ns, known.plan)

    def bound(self, budget_bytes: int) -> int:
        """The best bound known for a budget: the largest that was proved at it or above it."""
        return max((ns for at, ns in self._bounds if at >= budget_bytes), default=self.subject.total_cost_ns)

    def infeasible(self, budget_bytes: int) -> bool:
        """Whether a budget is proved too small."""
        return budget_bytes < self.least_bytes

    def at(self, budget_bytes: int) -> Known:
        """All that is known about one budget, in bytes, fixed ones included."""
        known = Known(Problem(self.subject, budget_bytes), infeasible=self.infeasible(budget_bytes))
        known = known.needing(self.least_bytes)
        known = known.with_bound(Bound(self.bound(budget_bytes)))
        known = known.sufficing(min((verdict.peak_bytes for verdict, _ in self.plans), default=None))
        for verdict, plan in self.plans:
            if verdict.peak_bytes <= budget_bytes:
                known = known.with_plan(verdict, plan)
        return known
