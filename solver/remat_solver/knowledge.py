"""What is known about a problem, and the answer that follows from it: pure, without threads, clocks or databases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from remat_ir import Answer, AnyPlan, Problem, Proof, Status, Verdict, gap_of, problem_digest, readable
from remat_ir.restrictions import gap_sentence, optimal_sentence

_LIMITS = {
    "gap": "the gap is small enough",
    "time": "the time is up",
    "cancel": "cancelled",
    "memory": "the solver's memory is used up",
}


def sentence(answer: Answer) -> str:
    """What an answer says to a person, from its status and its numbers alone.

    >>> sentence(Answer(Status.INFEASIBLE, "auto", 5, least_budget_bound_bytes=9))
    'No plan fits: every plan needs at least 9 B; the budget is 5 B.'
    """
    why = _LIMITS.get(answer.limit or "")
    if answer.status is Status.OPTIMAL:
        return optimal_sentence(answer.restricted_to)
    if answer.status is Status.INFEASIBLE:
        least = answer.least_budget_bound_bytes
        needs = "" if least is None else f" every plan needs at least {readable(least)};"
        return f"No plan fits:{needs} the budget is {readable(answer.budget_bytes)}."
    if answer.status is Status.FAILED:
        return answer.message or "The solver failed."
    if answer.gap is not None:
        return gap_sentence(answer.gap, answer.restricted_to, why or "the method has run to its end")
    if answer.limit == "time":
        return "No plan was found in the time given, and none was proved impossible; give it more time."
    return f"There is no plan yet; {why}." if why else "The method has run to its end without a plan."


def claim_sentence(answer: Answer) -> str:
    """What an answer says about a bound of the whole space beyond the one that is certified; empty without one.

    >>> claim_sentence(Answer(Status.FEASIBLE, "auto", 5, 100, 90, claimed_bound_ns=99, claimed_by="staged"))
    'staged claims a gap of 1 %, without a certificate.'
    """
    claimed, cost, by = answer.claimed_bound_ns, answer.cost_ns, answer.claimed_by
    if claimed is None or cost is None or answer.restricted_to or claimed <= (answer.bound_ns or 0):
        return ""
    if claimed == cost:
        return f"{by} claims that no plan costs less, without a certificate."
    return f"{by} claims a gap of {100 * gap_of(cost, claimed):.3g} %, without a certificate."


Within = tuple[str, ...]
"""Names of restrictions (`remat_ir.restrictions`) that hold together; none of them means the whole space."""


class Bound(NamedTuple):
    """A proved lower bound on the cost, in ns, of every plan of a space; the one is nothing without the other."""

    ns: int
    within: Within = ()


@dataclass(frozen=True)
class Ending:
    """How the last attempt at a problem ended.

    Attributes:
        limit: "time", "cancel", "memory", or None where its method ran to its end.
        searched: the space that it has searched to the end without finding a plan; None where it has not.
        reason: one sentence for a person, where there is no plan.
    """

    limit: str | None = None
    searched: Within | None = None
    reason: str = ""


@dataclass(frozen=True)
class Known:
    """What is known about one problem; each part is true on its own, and none says how it was found.

    Attributes:
        problem: what it is about.
        verdict: cost and peak of the cheapest known plan, as verified; None without a plan.
        plan: that plan; None also where it is kept elsewhere.
        bounds: the best of each space, the whole space's first, then in the order of the restrictions' names.
        least_bytes: a budget that every plan of the whole space needs, fixed bytes included; None where none is proved.
        enough_bytes: a budget that is known to suffice.
        infeasible: whether it is proved that no plan of the whole space fits.
        proof: the certificate of the whole space's bound, or that no plan fits; None where there is none.
        least_proof: the certificate that no plan fits one byte less than `least_bytes`, where there is one.
        inside: a bound of a restricted space that has a certificate, and that; it may be below the space's in `bounds`,
            or of a certificate that the space is empty.
    """

    problem: Problem
    verdict: Verdict | None = None
    plan: AnyPlan | None = None
    bounds: tuple[Bound, ...] = ()
    least_bytes: int | None = None
    enough_bytes: int | None = None
    infeasible: bool = False
    proof: Proof | None = None
    least_proof: Proof | None = None
    inside: tuple[Bound, Proof] | None = None

    @property
    def cost_ns(self) -> int | None:
        """Of the best plan."""
        return None if self.verdict is None else self.verdict.cost_ns

    @property
    def whole_ns(self) -> int:
        """The bound for every plan of the whole space: at least each op once."""
        return self.within(())

    def within(self, space: Within) -> int:
        """The best bound that was proved in exactly this space; of the whole one, at least each op once; else −1."""
        known = next((bound.ns for bound in self.bounds if bound.within == space), -1)
        return known if space else max(known, self.problem.subject.total_cost_ns)

    def with_plan(self, verdict: Verdict, plan: AnyPlan | None = None) -> Known:
        """Also a plan, which is verified and fits."""
        known = self.sufficing(verdict.peak_bytes)
        if self.cost_ns is not None and verdict.cost_ns >= self.cost_ns:
            return known
        return replace(known, verdict=verdict, plan=plan)

    def with_bound(self, bound: Bound, proof: Proof | None = None) -> Known:
        """Also a bound, which counts in its own space only; `proof` is its certificate."""
        if bound.ns <= self.within(bound.within):
            return self
        bounds = tuple(sorted((*self._but(bound.within), bound), key=lambda each: each.within))
        if not bound.within:
            return replace(self, bounds=bounds, proof=proof)
        return replace(self, bounds=bounds, inside=self.inside if proof is None else (bound, proof))

    def without_bound(self, space: Within) -> Known:
        """Without what was proved in a space: it has turned out to be wrong."""
        inside = None if self.inside is not None and self.inside[0].within == space else self.inside
        return replace(self, bounds=self._but(space), proof=self.proof if space else None, inside=inside)

    def _but(self, space: Within) -> tuple[Bound, ...]:
        return tuple(bound for bound in self.bounds if bound.within != space)

    def needing(self, budget_bytes: int | None, proof: Proof | None = None) -> Known:
        """Also a budget that every plan of the whole space is proved to need, and the certificate for a byte less."""
        if budget_bytes is None or budget_bytes <= (self.least_bytes or 0):
            return self
        return replace(self, least_bytes=budget_bytes, least_proof=proof)

    def sufficing(self, budget_bytes: int | None) -> Known:
        """Also a budget at which a plan is known."""
        if budget_bytes is None or (self.enough_bytes is not None and budget_bytes >= self.enough_bytes):
            return self
        return replace(self, enough_bytes=budget_bytes)

    def bound(self, max_gap: float = 0.0, searched: Sequence[str] | None = None) -> Bound:
        """The bound to report: the whole space's where it is within the gap, else the best one there is.

        Without a plan, but with a space that was searched to its end, the best one for that space. A plan that costs
        less than a space's bound lies outside of it: such a bound says nothing of how good the plan is.
        """
        whole, cost = self.whole_ns, self.cost_ns
        if cost is None and searched:
            larger = [bound.ns for bound in self.bounds if set(bound.within) <= set(searched)]
            return Bound(max([whole, *larger]), tuple(searched))
        if cost is not None and gap_of(cost, whole) <= max_gap:
            return Bound(min(whole, cost))
        saying = [bound for bound in self.bounds if cost is None or bound.ns <= cost]
        return max((Bound(whole), *saying), key=lambda bound: bound.ns)

    def settled(self, max_gap: float = 0.0) -> bool:
        """Whether more would change nothing: no plan fits, or the best one is within the gap."""
        cost = self.cost_ns
        return self.infeasible or (cost is not None and gap_of(cost, self.bound(max_gap).ns) <= max_gap)

    def status(self, max_gap: float = 0.0, ending: Ending = Ending()) -> tuple[Status, str | None]:
        """How an attempt stands that ended so, and what limited it: None where nothing did."""
        if self.infeasible:
            return Status.INFEASIBLE, None
        cost, cancelled = self.cost_ns, ending.limit == "cancel"
        if cost is None:
            if cancelled:
                return Status.CANCELLED, "cancel"
            return Status.NOTHING_FOUND, ending.limit if ending.searched is None else None
        bound_ns = self.bound(max_gap).ns
        if bound_ns >= cost:
            return Status.OPTIMAL, None
        if gap_of(cost, bound_ns) <= max_gap:
            return Status.FEASIBLE, "gap"
        return Status.CANCELLED if cancelled else Status.FEASIBLE, ending.limit

    def answer(
        self,
        method: str,
        max_gap: float = 0.0,
        ending: Ending = Ending(),
        *,
        seconds: float = 0.0,
        digest: str | None = None,
        notes: Sequence[str] = (),
    ) -> Answer:
        """All of it as an answer.

        Args:
            method: what was asked for. seconds: what it took.
            digest: the problem's, where it is known already.
            notes: sentences for a person that follow the one on how it ended.
        """
        status, limit = self.status(max_gap, ending)
        bound = self.bound(max_gap, ending.searched)
        cost, peak = (None, None) if self.verdict is None or self.infeasible else self.verdict
        proof = self.least_proof if self.proof is None and cost is None else self.proof
        if bound.within and not self.infeasible and self.inside is not None and self.inside[0].within == bound.within:
            proof = self.inside[1]
        answer = Answer(
            status=status,
            method=method,
            budget_bytes=self.problem.budget_bytes,
            seconds=seconds,
            limit=limit,
            restricted_to=() if self.infeasible else bound.within,
            least_budget_bytes=self.enough_bytes,
            least_budget_bound_bytes=self.least_bytes,
            digest=problem_digest(self.problem) if digest is None else digest,
            plan=self.plan,
            proof=proof,
        ).priced(self.problem.subject.total_cost_ns, cost, None if self.infeasible else bound.ns, peak)
        said = ending.reason if cost is None and ending.reason else sentence(answer)
        return replace(answer, message=" ".join([said, *notes]))
