"""From what is stored to an answer: what is known by it, whether that is final, and the answer object of the wire."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from remat_ir import Answer, AnswerVerdict, AnyPlan, Problem, Status, Verdict, certified_need, gap_of
from remat_ir.proof import certain_need, certifiable
from remat_solver import Bound, Ending, Known, claim_sentence, sentence

from .claims import Claim, Effort
from .snapshot import Row, Snapshot
from .store import StoredPlan
from .verifier import CheckedProof


@dataclass(frozen=True)
class Stored:
    """Everything that the store has about one problem for one method, in net bytes.

    `proof` is checked on this problem. `near` is a plan of a graph with other costs, verified on this one, that is not
    in the store under this graph yet; `carried` says that something came from such a graph; `partial`, that the time
    was too short for some certificate. `snapshot` is what all of it rests on. `certain_bytes` is what a single op
    needs, for certain; None where it was not worked out yet. `unsound` are rows that were passed over: damaged, or of
    a smaller space than the method searches by now. `refuting` is what a verified plan costs and needs that shows
    others to be wrong.
    """

    problem: Problem
    snapshot: Snapshot | None = None
    plan: StoredPlan | None = None
    near: tuple[AnyPlan, Verdict] | None = None
    proof: CheckedProof | None = None
    claim: Claim | None = None
    restricted: Claim | None = None
    least_bytes: int | None = None
    enough_bytes: int | None = None
    effort: Effort | None = None
    carried: bool = False
    partial: bool = False
    certify: bool = True
    certain_bytes: int | None = None
    unsound: tuple[Row, ...] = ()
    refuting: Verdict | None = None

    @cached_property
    def known(self) -> Known:
        """What is known by it."""
        known = Known(self.problem).needing(self.least_bytes).sufficing(self.enough_bytes)
        if self.proof is not None and self.proof.bound_ns is not None:
            known = known.with_bound(Bound(self.proof.bound_ns))
        if self.claim is not None and not (self.certify and certifiable(self.problem.subject)):
            known = known.with_bound(Bound(self.claim.bound_ns))
        if self.restricted is not None:
            known = known.with_bound(Bound(self.restricted.bound_ns, self.restricted.within))
        if self.plan is not None:
            known = known.with_plan(self.plan.claimed)
        if self.near is not None:
            known = known.with_plan(self.near[1])
        too_small = self.least_bytes is not None and self.least_bytes > self.problem.budget_bytes
        return replace(known, infeasible=True) if (too_small or self.proves_none) and known.cost_ns is None else known

    @property
    def proves_none(self) -> bool:
        """Whether it is certified that no plan fits."""
        return self.proof is not None and self.proof.bound_ns is None

    @property
    def cost_ns(self) -> int | None:
        """The cost of the better plan."""
        return self.known.cost_ns

    @property
    def uses_near(self) -> bool:
        """Whether the better plan is the near one."""
        return self.near is not None and (self.plan is None or self.near[1].cost_ns < self.plan.cost_ns)

    @property
    def proof_id(self) -> str | None:
        """The row of the certificate, where that is for exactly this problem already."""
        found = None if self.snapshot is None else self.snapshot.too_small if self.proves_none else self.snapshot.proof
        return found.id if found is not None and self.proof is not None and found.data == self.proof.data else None

    def is_final(self, max_gap: float, time_limit_s: float) -> bool:
        """Whether what is known answers a request, by the rules above."""
        effort = self.effort
        if self.partial:  # more is proved than is known yet
            return self.cost_ns is not None and self.known.settled(max_gap)
        if self.known.infeasible and self.certify and certifiable(self.problem.subject) and not self.proves_none:
            # claimed only: a solve certifies it, if that was not tried already
            return effort is not None and (effort.status == Status.INFEASIBLE or effort.settled)
        if self.known.settled(max_gap):
            return True
        if effort is None or effort.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return False  # what proved it is gone
        if self.cost_ns is None and effort.status != Status.NOTHING_FOUND:
            return False  # the plan that the effort found is gone
        if effort.settled or effort.seconds >= time_limit_s:
            return True
        if effort.limit is not None or self.claim is None or self.cost_ns is None:
            return False
        # it ended since this claim was enough and could not be certified
        return gap_of(self.cost_ns, min(self.claim.bound_ns, self.cost_ns)) <= max_gap

    def answer(self, method: str, max_gap: float, digest: str) -> Answer:
        """What is known as an answer, in net bytes, without its plan; its sentence only where the effort left one."""
        effort, known = self.effort, self.known
        if effort is None:
            return self.with_claims(replace(known.answer(method, max_gap, digest=digest), message=""))
        ending = Ending(effort.limit, effort.within or None)
        answer = known.answer(method, max_gap, ending, seconds=effort.seconds, digest=digest)
        own = known.cost_ns is None and (not known.infeasible or effort.status == Status.INFEASIBLE)
        return self.with_claims(replace(answer, message=effort.message if own else ""))

    def with_claims(self, answer: Answer) -> Answer:
        """An answer made from what is known, that says what of it has no certificate, and who claims that."""
        least = certain_need(self.problem.subject) if self.certain_bytes is None else self.certain_bytes
        if self.proves_none and self.snapshot is not None and self.snapshot.too_small is not None:
            least = max(least, self.snapshot.too_small.budget_bytes + 1)
        elif self.proves_none:
            least = max(least, self.problem.budget_bytes + 1)
        answer = certified_need(answer, AnswerVerdict(None, None, 0, least > self.problem.budget_bytes, least))
        if answer.status is Status.INFEASIBLE:
            return answer
        proved = self.problem.subject.total_cost_ns
        if self.proof is not None and self.proof.bound_ns is not None:
            proved = max(proved, self.proof.bound_ns)
        said = self.restricted if answer.restricted_to else self.claim
        claimed = answer.bound_ns
        if said is not None and not answer.restricted_to:
            claimed = said.bound_ns if answer.cost_ns is None else min(said.bound_ns, answer.cost_ns)
        if claimed is None or claimed <= proved:
            return answer
        said_by = answer.method if said is None else said.source or answer.method
        return replace(answer, claimed_bound_ns=claimed, claimed_by=said_by)


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
