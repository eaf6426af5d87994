"""From what is stored to the answer object of the wire: net bytes become the caller's, and a sentence is found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from remat_ir import Answer
from remat_solver import claim_sentence, sentence


def shifted(answer: Answer, fixed_bytes: int) -> Answer:
    """The same answer with `fixed_bytes` more on every count of bytes; negative takes them off."""
    if not fixed_bytes:
        return answer

    def move(number: int | None) -> int | None:
        return None if number is None else number + fixed_bytes

    return replace(
        answer,
        budget_bytes=answer.budget_bytes + fixed_bytes,
        peak_bytes=move(answer.peak_bytes),
        least_budget_bytes=move(answer.least_budget_bytes),
        least_budget_bound_bytes=move(answer.least_budget_bound_bytes),
    )


def document(answer: Answer, fixed_bytes: int, **more: Any) -> dict[str, Any]:
    """The answer object of the wire without its plan and its certificate, from an answer in net bytes."""
    moved = shifted(answer, fixed_bytes)
    message = moved.message or " ".join(filter(None, (sentence(moved), claim_sentence(moved))))
    return replace(moved, message=message, plan=None, proof=None, **more).to_json()


def rendered(data: dict[str, Any], plan_text: bytes | None, proof_text: bytes | None = None) -> bytes:
    """The body of a response: the answer object, its certificate and its plan spliced in as the texts that they are."""
    return spliced(head_of(data), plan_text, proof_text)


def head_of(data: dict[str, Any]) -> bytes:
    """An answer object without its plan and its certificate, as JSON text."""
    return json.dumps(data, separators=(",", ":")).encode()


def spliced(head: bytes, plan_text: bytes | None, proof_text: bytes | None) -> bytes:
    """A head with the texts of a certificate and of a plan as its last members."""
    parts = [head[:-1]]
    if proof_text is not None:
        parts += (b',"proof":', proof_text)
    if plan_text is not None:
        parts += (b',"plan":', plan_text)
    return b"".join((*parts, b"}"))
