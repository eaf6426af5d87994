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
        answer: the child's own answer, in net bytes; None where it never gave one.
        whole_bound_ns: the best bound that it proved over the whole space.
        kind: of the error that it reported: "invalid", "memory", "failed"; None without one.
    """

    def __init__(self, net: Problem, method: str, digest: str, fixed_bytes: int) -> None:
        self._net, self._method, self._digest, self._fixed = net, method, digest, fixed_bytes
        self.answer: Answer | None = None
        self.whole_bound_ns: int | None = None
        self.kind: str | None = None
        self._message = ""

    def proved(self, whole_bound_ns: int | None) -> None:
        """Note a bound for every plan."""
        if whole_bound_ns is not None and whole_bound_ns > (self.whole_bound_ns or -1):
            self.whole_bound_ns = whole_bound_ns

    def failed(self, kind: str, message: str) -> None:
        """Note the error that the child reported."""
        self.kind, self._message = kind, message

    def ended(self, data: dict[str, Any], whole_bound_ns: int | None) -> None:
        """Note the child's answer."""
        self.answer = shifted(replace(Answer.from_json({**data, "plan": None}), plan=None), -self._fixed)
        self.proved(whole_bound_ns)
        if not self.answer.restricted_to and self.answer.status is not Status.INFEASIBLE:
            self.proved(self.answer.bound_ns)

    @property
    def settled(self) -> bool:
        """Whether more time would change nothing: proved, or the method has run to its own end."""
        if self.answer is None:
            return False
        proved = self.answer.status in (Status.OPTIMAL, Status.INFEASIBLE)
        ran_out = self.answer.status in (Status.FEASIBLE, Status.NOTHING_FOUND) and self.answer.limit is None
        return proved or ran_out

    def solver_seconds(self, elapsed: float) -> float:
        """Seconds that the child says it was solving, or all of them where it says nothing."""
        return elapsed if self.answer is None else min(elapsed, self.answer.seconds)

    def partial(self, limit: str | None) -> Answer:
        """What there is to say without the child's own answer and without its plans, which are in the store."""
        return Answer(
            Status.NOTHING_FOUND,
            self._method,
            self._net.budget_bytes,
            bound_ns=self.whole_bound_ns,
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
