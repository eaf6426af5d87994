"""What is known about a subject at every budget: the least cost never rises with the budget."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from remat_ir import Answer, AnyPlan, Problem, Proof, Status, Subject, Verdict, certificate_for
from remat_ir.proof import InvalidProof, carried, certifiable, prove

from .known import Bound, Known


class Knowledge:
    """Plans by their peaks, bounds by their budgets, and the budgets that are too small, for one subject.

    A plan serves every budget from its peak on. A bound over the whole space holds at every smaller budget, where fewer
    plans fit. A budget that holds no plan is above every smaller one. Of graphs, and of chains without a link, only
    what a certificate proves is taken over; written anew for a smaller budget it may prove more.

    Args:
        least_bytes: a budget that every plan is known to need.
    """

    def __init__(self, subject: Subject, least_bytes: int = 0) -> None:
        self.subject, self.least_bytes = subject, least_bytes
        self.plans: list[tuple[Verdict, AnyPlan]] = []
        self._certified = certifiable(subject)
        self._bounds: list[tuple[int, int, Proof | None]] = []  # (budget, bound over the whole space, its certificate)
        self._too_small: Proof | None = None  # for the budget one byte below `least_bytes`

    def add(self, answer: Answer) -> None:
        """Take over what an answer found and proved; of restricted bounds, nothing."""
        if answer.plan is not None and answer.peak_bytes is not None and answer.cost_ns is not None:
            self.plans.append((Verdict(answer.cost_ns, answer.peak_bytes), answer.plan))
        infeasible = answer.status is Status.INFEASIBLE
        if answer.proof is not None and not infeasible:
            self._prove(answer.budget_bytes, answer.proof)
        elif not self._certified and answer.bound_ns is not None and not answer.restricted_to:
            self.bounded(answer.budget_bytes, answer.bound_ns)
        least = answer.least_budget_bound_bytes or 0
        if infeasible:
            least = max(least, answer.budget_bytes + 1)
        if least > self.least_bytes:
            self.least_bytes, self._too_small = least, None
            if answer.proof is not None:
                with contextlib.suppress(InvalidProof):
                    below = certificate_for(Problem(self.subject, least - 1), answer.proof)
                    self._too_small = below.proof if below.bound_ns is None else None

    def bounded(self, budget_bytes: int, bound_ns: int) -> None:
        """Record a bound on the cost of every plan within a budget."""
        self._bounds.append((budget_bytes, bound_ns, None))

    def _prove(self, budget_bytes: int, proof: Proof) -> None:
        """Record what a certificate written anew for a budget proves there, if anything."""
        with contextlib.suppress(InvalidProof):
            problem = Problem(self.subject, budget_bytes)
            here = carried(proof, problem)
            bound_ns = prove(problem, here).bound_ns
            if bound_ns is not None and (budget_bytes, bound_ns, here) not in self._bounds:
                self._bounds.append((budget_bytes, bound_ns, here))

    def nearest(self, budget_bytes: int) -> Proof | None:
        """The certificate of the best bound at the next larger budget that has one."""
        above = [(at, -ns, proof) for at, ns, proof in self._bounds if at >= budget_bytes and proof is not None]
        return min(above, key=lambda each: each[:2], default=(0, 0, None))[2]

    def best(self, budget_bytes: int) -> tuple[int, AnyPlan] | None:
        """The cheapest known plan within a budget, with its cost."""
        known = self.at(budget_bytes)
        return None if known.plan is None or known.cost_ns is None else (known.cost_ns, known.plan)

    def bound(self, budget_bytes: int) -> int:
        """The best bound known for a budget: the largest that was proved at it or above it."""
        return max((ns for at, ns, _ in self._bounds if at >= budget_bytes), default=self.subject.total_cost_ns)

    def infeasible(self, budget_bytes: int) -> bool:
        """Whether a budget is proved too small."""
        return budget_bytes < self.least_bytes

    def at(self, budget_bytes: int) -> Known:
        """All that is known about one budget, in bytes, fixed ones included."""
        known = Known(Problem(self.subject, budget_bytes), infeasible=self.infeasible(budget_bytes))
        known = known.needing(self.least_bytes, self._too_small)
        nearest = self.nearest(budget_bytes)
        if nearest is not None:
            self._prove(budget_bytes, nearest)
        for at, bound_ns, proof in self._bounds:
            if at == budget_bytes or (at > budget_bytes and proof is None):
                known = known.with_bound(Bound(bound_ns), proof)
        if known.infeasible:
            known = replace(known, proof=self._too_small)
        known = known.sufficing(min((verdict.peak_bytes for verdict, _ in self.plans), default=None))
        for verdict, plan in self.plans:
            if verdict.peak_bytes <= budget_bytes:
                known = known.with_plan(verdict, plan)
        return known
