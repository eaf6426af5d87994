"""Methods for graphs, run on what can be taken as one without a link: what they find and prove there holds for it.

With a link to the host, it holds among plans without transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat_ir import (
    AnyPlan,
    Chain,
    ChainPlan,
    Graph,
    Plan,
    Problem,
    Proof,
    Subject,
    Verdict,
    lifted_plan,
    lowered_plan,
    problem_digest,
)
from remat_ir.restrictions import NO_TRANSFERS, contains

from .incumbent import Incumbent
from .knowledge import Bound


@dataclass(frozen=True)
class Lift:
    """A chain as the graph of its steps, of the same costs and no more memory; a graph with a link without it.

    Plans are verified on the subject itself, so that a wrong lift cannot hide.
    """

    subject: Chain | Graph
    graph: Graph

    @classmethod
    def apply(cls, subject: Subject) -> Lift | None:
        """The lift of a chain, or a graph without its link; None of what has neither."""
        if isinstance(subject, Chain):
            return cls(subject, subject.to_graph())
        return cls(subject, subject.with_link(None)) if isinstance(subject, Graph) and subject.link else None

    @property
    def within(self) -> tuple[str, ...]:
        """Where there is a link to the host, plans with transfers may cost less."""
        return () if self.subject.link is None else (NO_TRANSFERS,)

    def lift(self, plan: AnyPlan | None) -> Plan | None:
        """The plan of the graph that a plan of the subject stands for; None where it has transfers."""
        if plan is None or not contains(self.subject, plan, (NO_TRANSFERS,)):
            return None
        if isinstance(self.subject, Chain) and isinstance(plan, ChainPlan):
            return lifted_plan(self.subject, plan)
        return plan if isinstance(plan, Plan) else None

    def invert(self, plan: Plan) -> ChainPlan | Plan:
        """The plan of the subject that a plan of the graph stands for."""
        return lowered_plan(self.subject, plan.computes) if isinstance(self.subject, Chain) else plan


class LiftedIncumbent(Incumbent):
    """The incumbent of a lift, which passes plans and bounds on to the incumbent of the subject itself."""

    def __init__(self, outer: Incumbent, *, plans_only: bool = False) -> None:
        """`plans_only`: what is proved among plans without transfers is not passed on."""
        lift = Lift.apply(outer.problem.subject)
        assert lift is not None
        problem = Problem(lift.graph, outer.problem.budget_bytes)
        # what is proved among plans without transfers alone has no certificate on the subject
        certify = outer.certifies and not lift.within
        super().__init__(problem, outer.deadline, outer.max_gap, certify=certify, dropped=outer.dropped)
        self.outer, self.lift, self.within, self._plans_only = outer, lift, lift.within, plans_only
        if not self.within:
            self.known = self.known.with_bound(Bound(outer.bound_ns), outer.known.proof)
        if (start := lift.lift(outer.plan)) is not None:
            super().offer(start, "start")

    def _take(self, plan: AnyPlan, verdict: Verdict, source: str) -> bool:
        """Take a plan of the lift, and offer the plan that it stands for."""
        better = super()._take(plan, verdict, source)
        if better and isinstance(plan, Plan):
            self.outer.offer(self.lift.invert(plan), source)
        return better

    def raise_bound(self, bound_ns: int, source: str, within: tuple[str, ...] = (), proof: Proof | None = None) -> None:
        """Record a bound here and, with the restriction that it needs there, on the subject."""
        super().raise_bound(bound_ns, source, within, proof)
        if not self._plans_only:
            self.outer.raise_bound(bound_ns, source, (*within, *self.within), self._outside(proof, self.problem))

    def rewritten(self, old: Proof, bound_ns: int, proof: Proof) -> None:
        """Take a shorter certificate here, and on the subject where it is the subject's."""
        super().rewritten(old, bound_ns, proof)
        before, after = self._outside(old, self.problem), self._outside(proof, self.problem)
        if not self._plans_only and not self.within and before is not None and after is not None:
            self.outer.rewritten(before, bound_ns, after)

    def prove_infeasible(
        self, reason: str, least_budget_bound_bytes: int | None = None, proof: Proof | None = None
    ) -> None:
        """Record that no plan fits; with a link to the host, that none without transfers does."""
        super().prove_infeasible(reason, least_budget_bound_bytes, proof)
        if self._plans_only:
            return
        if self.within:
            self.outer.nothing_within(self.within, reason)
        else:
            largest = Problem(self.lift.graph, (least_budget_bound_bytes or 1) - 1)
            self.outer.prove_infeasible(reason, least_budget_bound_bytes, self._outside(proof, self.problem, largest))

    @property
    def of_chain(self) -> bool:
        """Whether the subject is a chain, whose structure has been made use of already."""
        return isinstance(self.lift.subject, Chain)

    def cease_certifying(self) -> None:
        """Record that nobody works on a certificate any more, here and on the subject."""
        super().cease_certifying()
        self.outer.cease_certifying()

    def _outside(self, proof: Proof | None, *problems: Problem) -> Proof | None:
        """A certificate of the lift under one of some budgets as one of the subject, which says the same of both."""
        for problem in problems:
            if proof is not None and proof.digest == problem_digest(problem):
                return replace(proof, digest=problem_digest(Problem(self.lift.subject, problem.budget_bytes)))
        return None

    def nothing_within(self, restriction: tuple[str, ...], reason: str, proof: Proof | None = None) -> None:
        """Record that a restricted space holds no plan; its certificate is of the lift alone."""
        super().nothing_within(restriction, reason, proof)
        if not self._plans_only:
            self.outer.nothing_within((*restriction, *self.within), reason)

    def ends_without_plan(self, reason: str, searched: tuple[str, ...] = ()) -> None:
        """Record that a method has run to its end without a plan."""
        super().ends_without_plan(reason, searched)
        if not self._plans_only:
            self.outer.ends_without_plan(reason, (*searched, *self.within))

    def needs_at_least(self, budget_bytes: int | None, proof: Proof | None = None) -> None:
        """Record a proved least budget, which a link to the host may lower."""
        super().needs_at_least(budget_bytes, proof)
        if not self.within:
            smaller = Problem(self.lift.graph, (budget_bytes or 1) - 1)
            self.outer.needs_at_least(budget_bytes, self._outside(proof, smaller))

    def suffices(self, budget_bytes: int) -> None:
        """Record that a plan with this peak is known."""
        super().suffices(budget_bytes)
        self.outer.suffices(budget_bytes)

    def stopped(self) -> bool:
        """Whether there is a reason to stop, here or on the subject."""
        if super().stopped():
            return True
        if not self.outer.stopped():
            return False
        self.limit = self.limit or self.outer.limit
        return True

    def interrupted(self) -> bool:
        """Whether the time is up or the caller, who knows the subject's incumbent alone, has cancelled."""
        return super().interrupted() or self.outer.interrupted()

    def stop_for(self, limit: str) -> None:
        """Record what ended the solve from outside."""
        super().stop_for(limit)
        self.outer.stop_for(limit)

    def because(self, reason: str) -> None:
        """Say why there is no plan, here and in the subject's answer."""
        super().because(reason)
        if not self._plans_only:
            self.outer.because(reason)

    def note(self, sentence: str) -> None:
        """Add a sentence to the subject's answer, too."""
        super().note(sentence)
        if not self._plans_only:
            self.outer.note(sentence)
