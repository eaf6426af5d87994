"""No answer is taken on trust: its plan is replayed, its certificate checked, before anybody sees it.

Optimal, and a gap, mean what the certificate proves. What an answer says beyond it is kept apart, where there are
certificates, and `claimed_by` names who says it.
"""

from __future__ import annotations

from dataclasses import replace

from remat_ir import (
    Answer,
    AnswerVerdict,
    InvalidPlan,
    InvalidProof,
    Problem,
    Status,
    certified,
    certified_need,
    problem_digest,
    verify,
    verify_answer,
)

from ..errors import InvalidResponse
from .greedy import greedy_answer

UNNAMED = "the planner"
"""Who claims a bound that has no certificate, where the answer does not say."""


def checked(problem: Problem, answer: object) -> Answer:
    """An answer that is what it claims to be, replayed on the caller's own problem.

    Raises:
        InvalidResponse: nonsense, for another problem, a plan that the verifier refuses, claims that contradict
            each other, or a claim of infeasibility that a plan of the client's own refutes.
    """
    if not isinstance(answer, Answer):
        raise InvalidResponse(f"the planner answered with {type(answer).__name__}, not an answer")
    if not answer.status.ended:
        raise InvalidResponse(f"the planner answered that the solve is {answer.status.value}")
    if answer.status is Status.FAILED:
        raise InvalidResponse(f"the solve failed: {answer.message or 'no reason given'}")
    if answer.digest and answer.digest != problem_digest(problem):
        raise InvalidResponse("the answer is for another graph or budget: its digest is not the problem's")
    if answer.budget_bytes != problem.budget_bytes:
        raise InvalidResponse(f"the answer is for a budget of {answer.budget_bytes} bytes, not {problem.budget_bytes}")
    if answer.plan is None:
        return _without_plan(problem, answer)
    try:
        verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    except InvalidPlan as error:
        raise InvalidResponse(f"the plan is wrong: {error}") from None
    proved = _proved(problem, answer)
    if answer.status is Status.INFEASIBLE:
        raise InvalidResponse("the answer says infeasible and has a plan that fits")
    bound = problem.subject.total_cost_ns if answer.bound_ns is None else answer.bound_ns
    if bound > verdict.cost_ns:
        raise InvalidResponse(f"the bound of {bound} ns is above the cost of the plan, {verdict.cost_ns} ns")
    if answer.status is Status.OPTIMAL and bound != verdict.cost_ns:
        raise InvalidResponse(f"the answer says optimal, but its bound is {bound} ns and its cost {verdict.cost_ns} ns")
    priced = answer.priced(problem.subject.total_cost_ns, verdict.cost_ns, bound, verdict.peak_bytes)
    if bound > proved.proved_ns and answer.claimed_by is None:
        priced = replace(priced, claimed_by=UNNAMED)
    return replace(certified(problem, priced, proved), digest=problem_digest(problem))


def _proved(problem: Problem, answer: Answer) -> AnswerVerdict:
    """What an answer's certificate proves, if it has one.

    Raises:
        InvalidResponse: it is for another problem, or proves nothing, or contradicts the plan.
    """
    try:
        return verify_answer(problem, replace(answer, bound_ns=None, claimed_bound_ns=None))
    except InvalidProof as error:
        raise InvalidResponse(f"the certificate is wrong: {error}") from None


def _without_plan(problem: Problem, answer: Answer) -> Answer:
    if answer.status in (Status.OPTIMAL, Status.FEASIBLE):
        raise InvalidResponse(f"the answer says {answer.status.value} and has no plan")
    if answer.status is Status.INFEASIBLE and greedy_answer(problem, time_limit_s=3.0, look_s=0.0).plan is not None:
        raise InvalidResponse("the answer says infeasible, but the client's own greedy plan fits the budget")
    proved = _proved(problem, answer)
    if answer.status is Status.INFEASIBLE and not proved.infeasible and answer.claimed_by is None:
        answer = replace(answer, claimed_by=UNNAMED)
    return replace(certified_need(answer, proved), digest=problem_digest(problem))
