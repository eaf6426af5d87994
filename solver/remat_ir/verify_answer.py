"""The verdict on a whole answer: its plan is replayed, its bound follows from its certificate, both on the problem."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from .answer import Answer, Status
from .digest import problem_digest
from .errors import InvalidPlan
from .graph import Graph
from .problem import Problem
from .proof import Certificate, InvalidProof, Proof, carried, certain_need, certifiable, prove
from .restrictions import TAGS, contains, gap_sentence
from .tags import confined
from .verify import verify


class AnswerVerdict(NamedTuple):
    """What of an answer is certain.

    Attributes:
        cost_ns, peak_bytes: of the plan; None without one.
        bound_ns: certified for every plan of the whole space; that of each op once, where there is no certificate.
        infeasible: whether it is certified that no plan fits.
        least_budget_bytes: certified to be necessary: what a single op needs, or more by a certificate.
        restricted_ns: certified for every plan of the space that the answer names, by a certificate of that space.
        none_within: whether it is certified that no plan of that space fits.
    """

    cost_ns: int | None
    peak_bytes: int | None
    bound_ns: int
    infeasible: bool
    least_budget_bytes: int
    restricted_ns: int | None = None
    none_within: bool = False

    @property
    def proved_ns(self) -> int:
        """The greatest bound that is certified of the space that the answer names."""
        return max(self.bound_ns, self.restricted_ns or 0)


def within_space(problem: Problem, within: Sequence[str]) -> Problem:
    """The problem that certificates of a space are about: the graph to which `tags` confine a plan; else the problem.

    Raises:
        InvalidProof: it is a space without certificates.
    """
    if not within:
        return problem
    subject = problem.subject
    if tuple(within) != (TAGS,) or not isinstance(subject, Graph) or subject.backward_from is None:
        raise InvalidProof(f"there are no certificates of the space {', '.join(within)} here")
    return replace(problem, subject=confined(subject))


def certificate_for(problem: Problem, proof: Proof, within: Sequence[str] = ()) -> Certificate:
    """A certificate of a problem, or of another one with the same structure carried over to it, and what it proves.

    Args:
        within: the space that it is of.

    Raises:
        InvalidProof: it proves nothing here.

    >>> from remat_ir import Problem, graph_of, problem_digest
    >>> from remat_ir.proof import PairProof
    >>> graph = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
    >>> proof = PairProof(problem_digest(Problem(graph, 14)), op=2, pairs=())
    >>> certificate_for(Problem(graph, 9), proof).bound_ns is None
    True
    """
    problem = within_space(problem, within)
    if proof.digest != problem_digest(problem):
        proof = carried(proof, problem)
    return prove(problem, proof)


def verify_answer(problem: Problem, answer: Answer) -> AnswerVerdict:
    """Replay the plan of an answer and check its certificate, on the problem that it answers.

    What the answer says beyond the verdict, it claims: a greater bound, that no plan fits, that a greater budget is
    necessary. Of restricted spaces `tags` alone has certificates: of the graph to which tags confine a plan.

    Raises:
        InvalidPlan: the plan breaks a rule, or the answer says another cost or peak than it has, or a bound above it.
        InvalidProof: the certificate is for another problem, or proves nothing.

    >>> from remat_ir import Problem, graph_of, plain_plan
    >>> graph = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
    >>> problem = Problem(graph, 15)
    >>> verify_answer(problem, Answer.of_plan(problem, plain_plan(graph), method="greedy"))
    AnswerVerdict(cost_ns=6, peak_bytes=15, bound_ns=6, infeasible=False, least_budget_bytes=15, restricted_ns=None, \
none_within=False)
    """
    cost = peak = None
    if answer.plan is not None:
        cost, peak = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        for name, bound in (("bound", answer.bound_ns), ("claimed bound", answer.claimed_bound_ns)):
            if bound is not None and bound > cost:
                raise InvalidPlan(f"the {name} of {bound} ns is above the cost of the plan, {cost} ns")
    bound, least = problem.subject.total_cost_ns, certain_need(problem.subject)
    inside, restricted, none_within = _by_tags(problem, answer), None, False
    if answer.proof is not None and inside is not None:
        restricted = prove(inside, answer.proof).bound_ns
        none_within = restricted is None
    elif answer.proof is not None:
        budget, proved = _proved(problem, answer, answer.proof)
        if proved is None:
            least = max(least, budget + 1)
        else:
            bound = proved
    by_tags = inside is not None and answer.plan is not None and contains(problem.subject, answer.plan, (TAGS,))
    greatest = max(bound, restricted or 0) if by_tags else bound
    if cost is not None and peak is not None and (least > peak or greatest > cost or (by_tags and none_within)):
        raise InvalidProof("the certificate contradicts the plan: one of the two checks is wrong")
    return AnswerVerdict(cost, peak, bound, least > problem.budget_bytes, least, restricted, none_within)


def _by_tags(problem: Problem, answer: Answer) -> Problem | None:
    """The problem that an answer's certificate is about where that is of the space `tags`; else None."""
    if answer.proof is None or answer.proof.digest == problem_digest(problem):
        return None
    with suppress(InvalidProof):
        inside = within_space(problem, answer.restricted_to)
        return inside if answer.proof.digest == problem_digest(inside) else None
    return None


def certified(problem: Problem, answer: Answer, verdict: AnswerVerdict) -> Answer:
    """An answer that says as proved what is, and as claimed what else it said of its own problem.

    Bounds of joins, of chains with a link, and within restricted spaces but `tags` have no certificates: they stay
    where they are, and `claimed_by` names who says them.
    """
    answer = certified_need(answer, verdict)
    said_by = answer.claimed_by or answer.method
    bound = answer.bound_ns
    if answer.status is Status.INFEASIBLE or bound is None or bound <= verdict.proved_ns:
        return answer
    claimed = max(bound, answer.claimed_bound_ns or 0)
    if answer.restricted_to or not certifiable(problem.subject):
        return replace(answer, claimed_bound_ns=claimed, claimed_by=said_by)
    status = Status.FEASIBLE if answer.status is Status.OPTIMAL else answer.status
    less = replace(answer, status=status, claimed_bound_ns=claimed, claimed_by=said_by)
    total = problem.subject.total_cost_ns
    less = less.priced(total, answer.cost_ns, verdict.bound_ns, answer.peak_bytes)
    why = f"{said_by} claims more, without a certificate"
    return less if less.gap is None else replace(less, message=gap_sentence(less.gap, (), why))


def certified_need(answer: Answer, verdict: AnswerVerdict) -> Answer:
    """An answer that calls a budget necessary, or no plan possible, only as far as that is certified.

    Where it says that no plan fits and that is not certified, nothing was found, and `claimed_by` names who says more.
    Of a join, of which nothing can be certified, both stay as they are said, and `claimed_by` names who says them.
    """
    if answer.status is Status.INFEASIBLE and not verdict.infeasible:
        said_by = answer.claimed_by or answer.method
        if not verdict.least_budget_bytes:
            return replace(answer, claimed_by=said_by)
        said = infeasible_claim(said_by, answer.message)
        answer = replace(answer, status=Status.NOTHING_FOUND, claimed_by=said_by, message=said)
    necessary = answer.least_budget_bound_bytes
    if necessary is None or necessary <= verdict.least_budget_bytes:
        return answer
    return replace(answer, least_budget_bound_bytes=verdict.least_budget_bytes or None)


def infeasible_claim(claimed_by: str, reason: str) -> str:
    """What an answer says to a person where a method's word is all there is for it that no plan fits."""
    return f"There is no plan; {claimed_by} claims, without a certificate: {reason or 'no plan fits.'}"


def _proved(problem: Problem, answer: Answer, proof: Proof) -> tuple[int, int | None]:
    """The budget that a certificate is about, and what it proves there.

    It is the problem's, or one byte less than the answer says is necessary. Of the problem's, what shows that no plan
    fits may show the other as well.
    """
    least = answer.least_budget_bound_bytes
    larger = None if least is None or least < 1 else Problem(problem.subject, least - 1)
    if proof.digest == problem_digest(problem):
        proved = prove(problem, proof).bound_ns
        if proved is None and larger is not None and larger.budget_bytes > problem.budget_bytes:
            with suppress(InvalidProof):
                if certificate_for(larger, proof).bound_ns is None:
                    return larger.budget_bytes, None
        return problem.budget_bytes, proved
    if larger is None or (answer.status is Status.INFEASIBLE and larger.budget_bytes < problem.budget_bytes):
        raise InvalidProof("the certificate is for another budget than the problem's")
    proved = prove(larger, proof).bound_ns
    if proved is not None and larger.budget_bytes < problem.budget_bytes:
        raise InvalidProof(f"the certificate leaves open whether a plan fits {larger.budget_bytes} bytes")
    return larger.budget_bytes, proved
