"""No answer is taken on trust: what it says is replayed on the caller's own problem before anybody sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remat_ir import Answer, InvalidPlan, Problem, Status, problem_digest, verify

from ..errors import BadAnswer
from .greedy import greedy_answer


def checked(problem: Problem, answer: Any) -> Answer:
    """An answer that is what it claims to be, replayed on the caller's own problem.

    Raises:
        BadAnswer: nonsense, for another problem, a plan that the judge refuses, claims that contradict each other, or
            a claim of infeasibility that a plan of the client's own refutes.
    """
    if not isinstance(answer, Answer):
        raise BadAnswer(f"the planner answered with {type(answer).__name__}, not an answer")
    if not answer.status.ended:
        raise BadAnswer(f"the planner answered that the solve is {answer.status.value}")
    if answer.status is Status.FAILED:
        raise BadAnswer(f"the solve failed: {answer.message or 'no reason given'}")
    if answer.digest and answer.digest != problem_digest(problem):
        raise BadAnswer("the answer is for another graph or budget: its digest is not the problem's")
    if answer.budget_bytes != problem.budget_bytes:
        raise BadAnswer(f"the answer is for a budget of {answer.budget_bytes} bytes, not {problem.budget_bytes}")
    if answer.plan is None:
        return _without_plan(problem, answer)
    try:
        verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    except InvalidPlan as error:
        raise BadAnswer(f"the plan is wrong: {error}") from None
    if answer.status is Status.INFEASIBLE:
        raise BadAnswer("the answer says infeasible and has a plan that fits")
    bound = problem.subject.total_cost_ns if answer.bound_ns is None else answer.bound_ns
    if bound > verdict.cost_ns:
        raise BadAnswer(f"the bound of {bound} ns is above the cost of the plan, {verdict.cost_ns} ns")
    if answer.status is Status.OPTIMAL and bound != verdict.cost_ns:
        raise BadAnswer(f"the answer says optimal, but its bound is {bound} ns and its cost {verdict.cost_ns} ns")
    priced = answer.priced(problem.subject.total_cost_ns, verdict.cost_ns, bound, verdict.peak_bytes)
    return replace(priced, digest=problem_digest(problem))


def _without_plan(problem: Problem, answer: Answer) -> Answer:
    if answer.status in (Status.OPTIMAL, Status.FEASIBLE):
        raise BadAnswer(f"the answer says {answer.status.value} and has no plan")
    if answer.status is Status.INFEASIBLE and greedy_answer(problem, time_limit_s=3.0, look_s=0.0).plan is not None:
        raise BadAnswer("the answer says infeasible, but the client's own greedy plan fits the budget")
    return replace(answer, digest=problem_digest(problem))
