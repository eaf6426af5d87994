"""From what is stored to the answer object of the wire: net bytes become the caller's, and a sentence is found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from remat_ir import Answer, Status
from remat_ir.restrictions import gap_sentence, optimal_sentence

_LIMITS = {
    "gap": "the gap that was asked for is reached",
    "time": "the time is up",
    "cancel": "cancelled",
    "memory": "the solver's memory is used up",
}


def shifted(answer: Answer, fixed_bytes: int) -> Answer:
    """The same answer with `fixed_bytes` more on every count of bytes; negative takes them off."""

    def move(number: int | None) -> int | None:
        return None if number is None else number + fixed_bytes

    return replace(
        answer,
        budget_bytes=answer.budget_bytes + fixed_bytes,
        peak_bytes=move(answer.peak_bytes),
        least_budget_bytes=move(answer.least_budget_bytes),
        least_budget_bound_bytes=move(answer.least_budget_bound_bytes),
    )


def sentence(answer: Answer) -> str:
    """What an answer says to a person, from its numbers alone."""
    if answer.status is Status.OPTIMAL:
        return optimal_sentence(answer.restricted_to)
    if answer.status is Status.INFEASIBLE:
        least = answer.least_budget_bound_bytes
        needs = "" if least is None else f" every plan needs at least {least} bytes, and"
        return f"No plan fits:{needs} the budget is {answer.budget_bytes}."
    if answer.status is Status.FAILED:
        return answer.message or "The solver failed."
    if answer.gap is not None:
        why = _LIMITS.get(answer.limit or "", "the method has run to its end")
        return gap_sentence(answer.gap, answer.restricted_to, why)
    if answer.limit == "time":
        return "No plan was found in the time given, and none was proved impossible; give it more time."
    if answer.limit in _LIMITS:
        return f"There is no plan yet; {_LIMITS[answer.limit or '']}."
    return "The method has run to its end without a plan."


def document(answer: Answer, fixed_bytes: int, **more: Any) -> dict[str, Any]:
    """The answer object of the wire without its plan, from an answer in net bytes."""
    moved = shifted(answer, fixed_bytes)
    return replace(moved, message=moved.message or sentence(moved), plan=None, **more).to_json()


def rendered(data: dict[str, Any], plan_text: bytes | None) -> bytes:
    """The body of a response: the answer object, and its plan spliced in as the text that it already is."""
    head = json.dumps(data, separators=(",", ":")).encode()
    return head if plan_text is None else head[:-1] + b',"plan":' + plan_text + b"}"
