"""What an answer says to a person."""

from __future__ import annotations

from remat_ir import Answer, Status, gap_of, readable
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
