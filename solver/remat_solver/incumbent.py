"""What a solve has found and proved so far: the one place that methods write to, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from remat_ir import (
    Answer,
    AnyPlan,
    InvalidPlan,
    Problem,
    Progress,
    Proof,
    Verdict,
    certified_need,
    gap_of,
    verify,
    verify_answer,
    worth_more_time,
)
from remat_ir.proof import certain_need, certifiable
from remat_ir.read import LARGEST_INTEGER
from remat_ir.verify_answer import infeasible_claim

from .contradiction import NO_PLAN_NS, refuted, report_bound, report_budget, report_plan
from .deadline import Deadline
from .knowledge import Bound, Ending, Known, claim_sentence

_TOLERANCE = 3e-6
"""By how much, as a share of the cost, an engine's claim may fall short of the gap: it counts in floating point."""
_CERTIFY_S = 2.0
"""Seconds that a claim's certificate may take beyond the time that it took to make the claim."""


class Incumbent:
    """A thread-safe view of what is known about a problem; every plan is verified on its way in.

    Methods offer plans and raise bounds; whoever started the solve reads the answer. Improvements are reported as
    `Progress`. All methods may be called from several threads.

    A verified plan refutes every bound above its cost in the spaces that it lies in: such a bound is logged with its
    instance and forgotten, and nothing more is taken from its source (`remat_solver.contradiction`).

    Attributes:
        problem: the original problem, on which plans are verified.
        deadline: when to stop.
        steps: of training that will run by the plan, which bound what a better one is worth; None: any gain is.
        known: what is known now; it never changes, but is replaced.
        reason: one sentence for a person on why there is no plan.
        certifies: whether bounds of the whole space count only with a certificate; there are none for joins and for
            chains with a link.
        dropped: the names of methods of which a plan did not verify; shared with those who solve parts of the problem.
        claim: where `certifies`, a greater bound of the whole space that came without a certificate, and from whom.
        limit: what has ended the solve: "time", "memory", "cancel" or "gap"; None while nothing has.
        exhausted: whether a restricted space is known to hold no plan.
        chain_cost_ns: of the best persistent chain schedule found: the answer's baseline.
    """

    def __init__(
        self,
        problem: Problem,
        deadline: Deadline,
        max_gap: float = 0.0,
        on_progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        certify: bool = False,
        steps: int | None = None,
        dropped: set[str] | None = None,
    ) -> None:
        self.problem = problem
        self.deadline = deadline
        self.max_gap = max_gap
        self.steps = steps
        self.known = Known(problem)
        self.reason = ""
        self.certifies = certify and certifiable(problem.subject)
        self.claim: tuple[int, str] | None = None
        self.dropped: set[str] = set() if dropped is None else dropped
        self._claimed_enough_s: float | None = None
        self._ceased = False
        self._claimed_none: str | None = None
        self._notes: list[str] = []
        self.chain_cost_ns: int | None = None
        self._sources: dict[tuple[str, ...], str] = {}
        self._distrusted: set[str] = set()
        self._searched: tuple[str, ...] | None = None
        self.exhausted = False
        self._on_progress = on_progress
        self._cancelled = cancelled
        self.limit: str | None = None
        self._closed = False
        self._lock = threading.RLock()

    @property
    def plan(self) -> AnyPlan | None:
        """The best plan."""
        return self.known.plan

    @property
    def cost_ns(self) -> int | None:
        """Of the best plan."""
        return self.known.cost_ns

    @property
    def bound_ns(self) -> int:
        """Proved for every plan of the whole space."""
        return self.known.whole_ns

    @property
    def infeasible(self) -> bool:
        """Whether it is proved that no plan of the whole space fits."""
        return self.known.infeasible

    def offer(self, plan: AnyPlan, source: str) -> bool:
        """Take a method's plan if it is verified and cheaper than the incumbent.

        A plan that breaks a rule or the budget is a bug in the method: it is logged and dropped, and the solve goes on.
        """
        try:
            return self.try_offer(plan, source)
        except InvalidPlan as error:
            self.drop(plan, source, error)
            return False

    def try_offer(self, plan: AnyPlan, source: str) -> bool:
        """Take a plan that may be invalid, such as a person's, if it is cheaper than the incumbent.

        Raises:
            InvalidPlan: the plan breaks a rule or the budget.
        """
        return self._take(plan, verify(self.problem, plan), source)

    def drop(self, plan: AnyPlan | None, source: str, error: InvalidPlan) -> None:
        """Log that a method's plan, or the making of it, breaks a rule, and name the method in the answer."""
        report_plan(self.problem, plan, source, error)
        self.dropped.add(source)

    def _take(self, plan: AnyPlan, verdict: Verdict, source: str) -> bool:
        """Take a plan that has been verified, if it is cheaper than the incumbent."""
        with self._lock:
            if self._closed:
                return False
            before, self.known = self.known, self.known.with_plan(verdict, plan)
            if self.known.plan is before.plan:
                self._needs_no_more(plan)
                return False
            self._refute(plan, verdict.cost_ns)
            self._report(source, plan)
            return True

    def offer_or_say(self, plan: AnyPlan, source: str) -> None:
        """Take a method's only plan, or end without one and say what the budget or the host's limit has against it."""
        try:
            self.try_offer(plan, source)
        except InvalidPlan as error:
            self.ends_without_plan(f"The plan does not fit: {error.reason}.")

    def offer_or_suffices(self, plan: AnyPlan, source: str) -> int:
        """Take a plan that may exceed the budget: then it shows what budget is enough. Its peak, in bytes.

        Of a plan that breaks another rule, which is dropped, the largest integer.
        """
        try:
            verdict = verify(replace(self.problem, budget_bytes=LARGEST_INTEGER), plan)
        except InvalidPlan as error:
            self.drop(plan, source, error)
            return LARGEST_INTEGER
        if verdict.peak_bytes <= self.problem.budget_bytes:
            self._take(plan, verdict, source)
        else:
            self.suffices(verdict.peak_bytes)
        return verdict.peak_bytes

    def raise_bound(self, bound_ns: int, source: str, within: tuple[str, ...] = (), proof: Proof | None = None) -> None:
        """Record a proved lower bound on the cost; `within` names the restrictions inside which it holds.

        `proof` is its certificate, which must have been checked; where the incumbent certifies, a bound of the whole
        space without one is kept apart as a claim.
        """
        with self._lock:
            claimed = self.certifies and not within and proof is None
            if self._closed or (proof is None and source in self._distrusted):
                return
            if bound_ns <= (self.best_claim() if claimed else self.known.within(within)):
                return
            if self.plan is not None and refuted(self.problem, self.plan, self.cost_ns, bound_ns, within):
                report_bound(self.problem, self.plan, bound_ns, within, source)
                self._distrusted.add(source)
                return
            if claimed:
                self.claim = bound_ns, source
                return
            self._sources[within] = source
            self.known = self.known.with_bound(Bound(bound_ns, within), proof)
            self._report(source)

    def rewritten(self, old: Proof, bound_ns: int, proof: Proof) -> None:
        """Take a shorter certificate, of nearly the same bound, in the place of an old one if that is still known."""
        with self._lock:
            if self._closed or self.known.proof != old or gap_of(self.cost_ns or 0, bound_ns) > self.max_gap:
                return
            self.known = self.known.without_bound(()).with_bound(Bound(bound_ns), proof)

    def best_claim(self) -> int:
        """The greatest bound of the whole space, in ns, certified or claimed."""
        with self._lock:
            return max(self.bound_ns, 0 if self.claim is None else self.claim[0])

    def claimed_enough(self) -> bool:
        """Whether a claim reaches the gap, but for an engine's tolerance: then all that is left is to certify it."""
        with self._lock:
            cost = self.cost_ns
            return self.certifies and cost is not None and gap_of(cost, self.best_claim()) <= self.max_gap + _TOLERANCE

    def cease_certifying(self) -> None:
        """Record that nobody works on a certificate any more: a claim that is enough ends the solve."""
        with self._lock:
            self._ceased = True

    def _certified_long_enough(self) -> bool:
        """Whether a claim that is enough could not be certified in as long again as it took to make it."""
        if not self.claimed_enough():
            return False
        elapsed = self.deadline.elapsed()
        if self._claimed_enough_s is None:
            self._claimed_enough_s = elapsed
        return self._ceased or elapsed > 2 * self._claimed_enough_s + _CERTIFY_S

    def _refute(self, plan: AnyPlan, cost_ns: int) -> None:
        """Forget the bounds that a new plan shows to be wrong, and a claim that there is no plan."""
        for bound_ns, within in self.known.bounds:
            if refuted(self.problem, plan, cost_ns, bound_ns, within):
                source = self._sources.get(within, "a bound")
                report_bound(self.problem, plan, bound_ns, within, source)
                self._distrusted.add(source)
                self.known = self.known.without_bound(within)
        if self.claim is not None and self.claim[0] > cost_ns:
            report_bound(self.problem, plan, self.claim[0], (), self.claim[1])
            self._distrusted.add(self.claim[1])
            self.claim = None
        if self.infeasible:
            self._report_infeasible(plan, self.reason)
            self.known, self.reason = replace(self.known, infeasible=False, proof=None), ""
        if self._claimed_none is not None:
            self._report_infeasible(plan, self._claimed_none)
            self._claimed_none = None
        self._needs_no_more(plan)

    def _report_infeasible(self, plan: AnyPlan, reason: str) -> None:
        peak = 0 if self.known.verdict is None else self.known.verdict.peak_bytes
        report_budget(self.problem, plan, self.problem.budget_bytes + 1, peak, reason)

    def _needs_no_more(self, plan: AnyPlan | None) -> None:
        """Forget a budget that is claimed to be necessary and that a known plan does not need."""
        claimed, known = self.known.least_bytes, self.known.enough_bytes
        if claimed is not None and known is not None and claimed > known:
            report_budget(self.problem, plan, claimed, known, "a bound on the budget")
            self.known = replace(self.known, least_bytes=None, least_proof=None)

    def prove_infeasible(
        self, reason: str, least_budget_bound_bytes: int | None = None, proof: Proof | None = None
    ) -> None:
        """Record that no plan of the whole space fits the budget; `reason` is one sentence for a person.

        Where the incumbent certifies, it ends the solve with a certificate, or where one op needs more, and is else a
        claim: the solve goes on, and the answer names the claim.
        """
        with self._lock:
            if self.plan is not None:
                self._report_infeasible(self.plan, reason)
                return
            if self.certifies and proof is None and certain_need(self.problem.subject) <= self.problem.budget_bytes:
                self._claimed_none = reason
                return
            self.known, self.reason = replace(self.known, infeasible=True, proof=proof), reason
            self.needs_at_least(least_budget_bound_bytes)

    def nothing_within(self, restriction: tuple[str, ...], reason: str, proof: Proof | None = None) -> None:
        """Record that a restricted space holds no plan, and its certificate if it has one; the whole space may."""
        with self._lock:
            if refuted(self.problem, self.plan, self.cost_ns, NO_PLAN_NS, restriction):
                assert self.plan is not None
                report_bound(self.problem, self.plan, NO_PLAN_NS, restriction, reason)
                return
            self.exhausted = True
            if proof is not None:
                self.known = replace(self.known, inside=(Bound(NO_PLAN_NS, restriction), proof))
            self.ends_without_plan(reason, restriction)

    def ends_without_plan(self, reason: str, searched: tuple[str, ...] = ()) -> None:
        """Record that a method has run to its end without a plan, in the space that it searched; nothing is proved.

        A plan that is known lies outside of that space, whose bounds say nothing of it: they are forgotten.
        """
        with self._lock:
            self._searched, self.reason = searched, reason
            for _, within in self.known.bounds if self.plan is not None and searched else ():
                if set(searched) <= set(within):
                    self.known = self.known.without_bound(within)

    def needs_at_least(self, budget_bytes: int | None, proof: Proof | None = None) -> None:
        """Record that every plan of the whole space needs at least this budget; `proof` is of one byte less."""
        with self._lock:
            self.known = self.known.needing(budget_bytes, proof)
            self._needs_no_more(self.plan)

    def suffices(self, budget_bytes: int) -> None:
        """Record that a plan with this peak is known."""
        with self._lock:
            self.known = self.known.sufficing(budget_bytes)
            self._needs_no_more(None)

    def best_bound(self) -> Bound:
        """The bound to report, with the restrictions that it needs."""
        with self._lock:
            return self.known.bound(self.max_gap, self._searched)

    def stopped(self) -> bool:
        """Whether there is a reason to stop: infeasible, gap reached, cancelled, or out of time."""
        with self._lock:
            if self._closed or self.known.settled(self.max_gap) or self._certified_long_enough():
                return True
            if self._cancelled is not None and self._cancelled():
                self.limit = "cancel"
                return True
            if self.deadline.passed():
                self.limit = self.limit or "time"
                return True
            return self._gained_enough()

    def interrupted(self) -> bool:
        """Whether the time is up or the caller has cancelled, whatever else there is to say."""
        return self.deadline.passed() or (self._cancelled is not None and self._cancelled())

    def _gained_enough(self) -> bool:
        """Whether the steps to come could gain less than the time that was spent; that ends the solve."""
        if worth_more_time(self.cost_ns, self.best_claim(), self.steps, self.deadline.elapsed()):
            return False
        if self.limit is None:
            self.limit = "gap"
            self.note(f"More time would cost more than {self.steps} steps could gain by it.")
        return True

    def close(self) -> None:
        """Have everybody who works on this incumbent stop: there is nothing left to do, or something broke.

        Plans and bounds that still come are not taken.
        """
        with self._lock:
            self._closed = True

    def stop_for(self, limit: str) -> None:
        """Record what ended the solve from outside: "memory", for one."""
        with self._lock:
            self.limit = limit

    def because(self, reason: str) -> None:
        """Say in one sentence for a person why there is no plan, where nothing else is to be recorded."""
        with self._lock:
            self.reason = reason

    def note(self, sentence: str) -> None:
        """Add a sentence for a person to the answer's message."""
        with self._lock:
            self._notes.append(sentence)

    def answer(self, method: str) -> Answer:
        """What there is to say now, as the final answer of a solve."""
        with self._lock:
            ending = Ending(self.limit, self._searched, self.reason)
            seconds = round(self.deadline.elapsed(), 6)
            answer = self.known.answer(method, self.max_gap, ending, seconds=seconds, notes=self._notes)
            answer = replace(answer, chain_cost_ns=self.chain_cost_ns, dropped_methods=tuple(sorted(self.dropped)))
            if answer.dropped_methods:
                names = ", ".join(answer.dropped_methods)
                answer = replace(answer, message=f"{answer.message} An invalid plan was dropped, of: {names}.")
            return self._with_claims(answer)

    def _with_claims(self, answer: Answer) -> Answer:
        """An answer that says which part of it is claimed without a certificate, and by whom."""
        if self.infeasible:
            return answer
        if self._claimed_none is not None and self.cost_ns is None:
            said = infeasible_claim(answer.method, self._claimed_none)
            return replace(answer, claimed_by=answer.method, message=said)
        if not self.certifies and self.known.proof is not None and not answer.restricted_to:
            return answer
        if answer.restricted_to or not self.certifies:
            inside = self.known.inside
            proved = 0 if inside is None or inside[0].within != answer.restricted_to else inside[0].ns
            if answer.bound_ns is None or answer.bound_ns <= max(proved, self.problem.subject.total_cost_ns):
                return answer
            said_by = self._sources.get(answer.restricted_to, answer.method)
            return replace(answer, claimed_bound_ns=answer.bound_ns, claimed_by=said_by)
        if self.claim is None or self.claim[0] <= self.bound_ns:
            return answer
        claimed, said_by = self.claim
        if self.cost_ns is None:
            return replace(answer, claimed_bound_ns=claimed, claimed_by=said_by)
        answer = replace(answer, claimed_bound_ns=min(claimed, self.cost_ns), claimed_by=said_by)
        return replace(answer, message=f"{answer.message} {claim_sentence(answer)}")

    def _report(self, source: str, plan: AnyPlan | None = None) -> None:
        if self._on_progress is not None:
            bound_ns, within = self.best_bound()
            elapsed = self.deadline.elapsed()
            proof = None if self.infeasible else self.known.proof
            self._on_progress(Progress(elapsed, self.cost_ns, bound_ns, source, plan, within, self.bound_ns, proof))


def checked(problem: Problem, answer: Answer) -> Answer:
    """An answer whose plan and certificate have been checked together, as whoever receives it will.

    What it says of budgets that are too small is certified, or `claimed_by` names who claims it.

    Raises:
        InvalidPlan: one of them is wrong: a bug here.
    """
    return certified_need(answer, verify_answer(problem, answer))
