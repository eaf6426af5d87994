"""What one solver child has said by its end, however it came to it, in net bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remat_ir import Answer, Problem, Status

from ..storage.answers import shifted

_REASONS = {"deadline": "time", "terminated": "time", "killed": "time", "memory": "memory"}


class Outcome:
    """Filled frame by frame; asked once for the final answer.

    Attributes:
        answer: the child's own answer, in net bytes, without its plan and certificate; None where it never gave one.
        proved_ns: the best bound that a certificate of its proves; None without one.
        claim: the best bound over the whole space beyond that, and who says it.
        kind: of the error that it reported: "invalid", "memory", "failed"; None without one.
    """

    def __init__(self, net: Problem, method: str, digest: str, fixed_bytes: int) -> None:
        self._net, self._method, self._digest, self._fixed = net, method, digest, fixed_bytes
        self.answer: Answer | None = None
        self.proved_ns: int | None = None
        self.claim: tuple[int, str] | None = None
        self.kind: str | None = None
        self._message = ""

    def proved(self, bound_ns: int) -> None:
        """Note what a checked certificate proves for every plan."""
        self.proved_ns = max(bound_ns, self.proved_ns or 0)

    def claimed(self, bound_ns: int | None, source: str) -> None:
        """Note a bound for every plan without a certificate, where it is more than is proved."""
        proved = max(self.proved_ns or 0, self._net.subject.total_cost_ns)
        if bound_ns is not None and bound_ns > max(proved, self.claim[0] if self.claim is not None else 0):
            self.claim = bound_ns, source

    def failed(self, kind: str, message: str) -> None:
        """Note the error that the child reported."""
        self.kind, self._message = kind, message

    def ended(self, data: dict[str, Any], whole_bound_ns: int | None) -> None:
        """Note the child's answer."""
        bare = {**data, "plan": None, "proof": None}
        self.answer = shifted(Answer.from_json(bare), -self._fixed)
        if self.answer.status is Status.INFEASIBLE:
            return
        self.claimed(whole_bound_ns, self._method)
        if not self.answer.restricted_to:
            self.claimed(self.answer.bound_ns, self._method)
            self.claimed(self.answer.claimed_bound_ns, self.answer.claimed_by or self._method)

    @property
    def settled(self) -> bool:
        """Whether more time would change nothing: proved, or the method has run to its own end."""
        return self.answer is not None and self.answer.ran_to_its_end

    def solver_seconds(self, elapsed: float) -> float:
        """Seconds that the child says it was solving, or all of them where it says nothing."""
        return elapsed if self.answer is None else min(elapsed, self.answer.seconds)

    def partial(self, limit: str | None) -> Answer:
        """What there is to say without the child's own answer and without its plans, which are in the store."""
        return Answer(
            Status.NOTHING_FOUND,
            self._method,
            self._net.budget_bytes,
            bound_ns=self.proved_ns,
            limit=limit,
            digest=self._digest,
        )

    def final(self, reason: str | None, out_of_time: bool) -> Answer:
        """The answer of the round: the child's own, or what its end means where it gave none."""
        if self.answer is not None:
            answer = replace(self.answer, digest=self._digest)
            if reason is None or answer.limit != "cancel":
                return answer
            # told to stop by the watchdog, at its deadline: no person has cancelled anything
            status = Status.NOTHING_FOUND if answer.cost_ns is None else Status.FEASIBLE
            return replace(answer, status=status, limit=_REASONS[reason], message="")
        if self.kind == "memory":
            return self.partial("memory")
        if self.kind is not None:
            return replace(self.partial(None), status=Status.FAILED, message=self._message)
        if reason is not None:
            return self.partial(_REASONS[reason])
        if out_of_time:
            return self.partial("time")
        return replace(self.partial(None), status=Status.FAILED, message="The solver died more than once.")
