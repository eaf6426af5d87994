"""What an answer says to a person."""

from __future__ import annotations

from remat_ir import Answer, Status
from remat_ir.restrictions import gap_sentence, optimal_sentence

_LIMITS = {
    "gap": "the gap that was asked for is reached",
    "time": "the time is up",
    "cancel": "cancelled",
    "memory": "the solver's memory is used up",
}


def sentence(answer: Answer) -> str:
    """What an answer says to a person, from its status and its numbers alone.

    >>> sentence(Answer(Status.INFEASIBLE, "auto", 5, least_budget_bound_bytes=9))
    'No plan fits: every plan needs at least 9 bytes, and the budget is 5.'
    """
    why = _LIMITS.get(answer.limit or "")
    if answer.status is Status.OPTIMAL:
        return optimal_sentence(answer.restricted_to)
    if answer.status is Status.INFEASIBLE:
        least = answer.least_budget_bound_bytes
        needs = "" if least is None else f" every plan needs at least {least} bytes, and"
        return f"No plan fits:{needs} the budget is {answer.budget_bytes}."
    if answer.status is Status.FAILED:
        return answer.message or "The solver failed."
    if answer.gap is not None:
        return gap_sentence(answer.gap, answer.restricted_to, why or "the method has run to its end")
    if answer.limit == "time":
        return "No plan was found in the time given, and none was proved impossible; give it more time."
    return f"There is no plan yet; {why}." if why else "The method has run to its end without a plan."
