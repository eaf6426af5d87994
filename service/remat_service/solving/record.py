"""A claimed solve with all that is needed to work on it, how it is given back, and what it has found, written down.

It is written down before anybody hears of it; every write is fenced by the claim. `Outcome` is what one solver child
has said by its end, however it came to it, in net bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
from sqlalchemy import Column, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, InvalidData, InvalidPlan, Problem, Status, read_plan

from ..context import Context
from ..identity import Caller, Keys
from ..requests.completion import end_request
from ..requests.read import stored_subject
from ..storage.answers import shifted
from ..storage.queue import Claimed, LostClaim
from ..storage.seals import SEALED, WHOLE, column
from ..storage.tables import events, requests
from ..storage.verifier import CheckedProof
from ..tenants.keys import caller_of

_AGAIN_S = 0.5  # between two tries to give a solve back


@dataclass(frozen=True)
class Claim(Claimed):
    """A claimed solve, its problem read."""

    caller: Caller
    net: Problem
    keys: Keys


async def read_claim(context: Context, claimed: Claimed) -> Claim | None:
    """The problem of a claimed solve; None where its graph is damaged, and the solve has failed."""
    row = claimed.row
    async with context.database.read(brief=True) as connection:
        caller = await caller_of(connection, row.tenant_id)
    subject = await stored_subject(context, caller, row.graph_key)
    if subject is None:
        await _fail(context, claimed, "The stored graph is damaged; POST the problem again.")
        return None
    keys = Keys("", "", row.graph_key, "", row.method_key, row.flight_key)
    return Claim(row, claimed.queued_s, caller, Problem(subject, row.budget_bytes), keys)


async def _fail(context: Context, claimed: Claimed, message: str) -> None:
    async with context.database.write(brief=True) as connection:
        await context.queue.settle(connection, claimed, {"state": "ended", "ended_at": context.clock.now()})
        open_ids = await open_requests(connection, claimed.id)
        for request in open_ids:
            await end_request(context, connection, request.id, Status.FAILED, None, message)
    context.notifier.notify(claimed.id, *(request.id for request in open_ids))


async def give_back(context: Context, claimed: Claimed, patience_s: float = 0.0) -> None:
    """Let a solve of ours wait again, if it still is ours; what it found is stored.

    Args:
        patience_s: seconds in which it is tried again where the database fails: a disk that was full has room again.
    """
    until = context.clock.monotonic() + patience_s
    while True:
        try:
            async with context.database.write(brief=True) as connection:
                await context.queue.settle(connection, claimed, {"state": "queued", "worker": None, "ticket": None})
        except LostClaim:
            return
        except Exception:  # noqa: BLE001 – a database may fail in any way, and is tried again
            if context.clock.monotonic() >= until:
                return
            await asyncio.sleep(_AGAIN_S)
        else:
            context.notifier.notify("queue")
            return


async def open_requests(connection: AsyncConnection, solve_id: str, *columns: Column[Any]) -> Sequence[Any]:
    """The requests that still wait for a solve, oldest first, or these columns of theirs; there may be thousands."""
    query = select(*columns) if columns else select(requests)
    waiting = query.where(requests.c.solve_id == solve_id, requests.c.ended.is_(False))
    return (await connection.execute(waiting.order_by(requests.c.created_at, requests.c.id))).all()


log = structlog.get_logger("remat_service.solving.record")

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


class SolveRecord:
    """The row of a solve as its worker knows it.

    Attributes:
        spent_s: seconds of solving in rounds that have ended.
        lost: the claim is somebody else's now.
    """

    def __init__(self, context: Context, claim: Claim) -> None:
        self._context, self._claim = context, claim
        self.spent_s: float = claim.row.spent_s
        self.lost = False
        told = claim.row._mapping
        sound = context.seals.holds("solves", told)
        self._told = {name: told[name] if sound else None for name in SEALED["solves"]}
        self._told |= {
            "id": claim.id, "total_cost_ns": claim.net.subject.total_cost_ns,
            "restricted_to": self._told["restricted_to"] or "",
        }  # fmt: skip
        self._began: float | None = None
        self._seq: int | None = 0 if claim.attempt == 1 else None  # None: others have written events, look them up

    @property
    def cost_ns(self) -> int | None:
        """Of the best plan."""
        cost: int | None = self._told["cost_ns"]
        return cost

    @property
    def bound_ns(self) -> int | None:
        """As last told."""
        bound: int | None = self._told["bound_ns"]
        return bound

    def begin(self) -> None:
        """A round starts now."""
        self._began = self._context.clock.monotonic()

    def end(self) -> float:
        """The round ends now: its seconds, which count as spent from here on."""
        elapsed = 0.0 if self._began is None else self._context.clock.monotonic() - self._began
        self._began = None
        self.spent_s += elapsed
        return elapsed

    def spent(self) -> float:
        """Seconds of solving up to this moment."""
        return self.spent_s + (0.0 if self._began is None else self._context.clock.monotonic() - self._began)

    async def write(self, connection: AsyncConnection, values: dict[str, Any]) -> None:
        """A fenced write to our row.

        Raises:
            LostClaim: it is ours no longer; the transaction is rolled back.
        """
        try:
            await self._context.queue.settle(connection, self._claim, values)
        except LostClaim:
            self.lost = True
            raise

    async def take(self, outcome: Outcome, frame: dict[str, Any]) -> None:
        """A frame from the child: checked, then stored, then told."""
        context, claim = self._context, self._claim
        if frame["type"] == "error":
            outcome.failed(frame["kind"], frame["message"])
            return
        said = frame["answer"] if frame["type"] == "answer" else frame
        least = said.get("least_budget_bound_bytes")
        least = None if least is None else least - claim.row.fixed_bytes
        source = (frame.get("source") or claim.row.method)[:100]
        space = column(said["restricted_to"])
        proof = None if said.get("proof") is None else await self._checked(said["proof"], least, space)
        if proof is not None and proof[1].bound_ns is not None and proof[1].space == WHOLE:
            outcome.proved(proof[1].bound_ns)
        if frame["type"] == "answer":
            outcome.ended(frame["answer"], frame["whole_bound_ns"])
        else:
            outcome.claimed(frame["whole_bound_ns"], source)
        better = None
        if said.get("plan") is not None:
            better = await self._judged(said["plan"], frame)
        bound, within = self._no_lower(said["bound_ns"], space, self.cost_ns if better is None else better[1].cost_ns)
        news = better is not None or (frame["type"] == "progress" and bound != self.bound_ns)
        if not news and proof is None:
            return
        async with context.database.write(brief=True) as connection:
            told = self._told | {"bound_ns": bound, "restricted_to": within}
            if better is not None:
                plan, verdict = better
                plan_id = await context.store.put_plan(
                    connection, claim.row.graph_key, claim.row.method_key, source, plan, verdict
                )
                if self.cost_ns is None or verdict.cost_ns <= self.cost_ns:
                    told |= {"plan_id": plan_id, "cost_ns": verdict.cost_ns, "peak_bytes": verdict.peak_bytes}
            if proof is not None:
                await context.store.put_proof(connection, claim.row.graph_key, *proof)
            if outcome.claim is not None:
                await context.store.raise_bound(connection, claim.row.graph_key, claim.net.budget_bytes, *outcome.claim)
            if news:
                await self.write(connection, context.seals.sealed("solves", told))
                await self._event(connection, told, source)
        if news:
            self._told = told
            context.notifier.notify(claim.id)

    def _no_lower(self, bound_ns: int | None, within: str, cost_ns: int | None) -> tuple[int | None, str]:
        """A bound and its space, or what was told before where that says more and no plan refutes it.

        A solver is not told what another worker's engine has claimed without a certificate, so it starts below that.
        """
        before, space = self.bound_ns, self._told["restricted_to"]
        if before is None or (bound_ns is not None and bound_ns >= before) or space not in ("", within):
            return bound_ns, within
        return (bound_ns, within) if cost_ns is not None and before > cost_ns else (before, space)

    async def _checked(self, data: object, least_bytes: int | None, space: str) -> tuple[int, CheckedProof] | None:
        """A child's certificate and its budget: one byte less than it says is needed, or the problem's own; it is of
        the space that the child's bound is confined to, or else of all plans.
        """
        net, proof = self._claim.net, None
        budgets = {net.budget_bytes, max(0, (least_bytes or 1) - 1)}
        looks = [(net.budget_bytes, space)] if space else []
        for budget, within in [*looks, *((budget, WHOLE) for budget in sorted(budgets, reverse=True))]:
            problem = Problem(net.subject, budget)
            try:
                proof = await self._context.verifier.new_proof(self._claim.row.graph_key, problem, data, within)
                if budget == net.budget_bytes or proof.bound_ns is None:
                    return budget, proof
            except (InvalidData, InvalidPlan) as error:
                why = str(error)
        self._refused("certificate", why)
        return None

    def _refused(self, what: str, why: str) -> None:
        self._context.metrics.rejections.labels("solver").inc()
        log.error(f"a solver's {what} was refused", solve=self._claim.id, method=self._claim.row.method, why=why)

    async def _judged(self, data: object, frame: dict[str, Any]) -> Any:
        try:
            plan = await asyncio.to_thread(read_plan, data)
            verdict = await self._context.verifier.verify(self._claim.net, plan)
        except (InvalidData, InvalidPlan) as error:
            self._refused("plan", str(error))
            return None
        if self.cost_ns is not None and verdict.cost_ns > self.cost_ns:
            return None
        if frame["type"] == "answer" and verdict.cost_ns == self.cost_ns:
            return None
        return plan, verdict

    async def _event(self, connection: AsyncConnection, told: dict[str, Any], source: str) -> None:
        if self._seq is None:
            last = await connection.scalar(select(func.max(events.c.seq)).where(events.c.solve_id == self._claim.id))
            self._seq = last or 0
        self._seq += 1
        point = {name: told[name] for name in ("cost_ns", "bound_ns", "restricted_to")}
        point |= {"solve_id": self._claim.id, "seq": self._seq, "seconds": round(self.spent(), 3), "source": source}
        await connection.execute(events.insert(), point)
