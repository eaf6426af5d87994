"""From what is stored to an answer, and answers lately given, given again without a look at plan or graph.

`ResponseCache` is the second of the three caches. What is remembered of a POST is a hit, under its caller's tenant,
scope and epoch and the SHA-256 of the body as sent. With it is remembered all that it rests on (`store.Snapshot`): the
stored bytes of its plan and of its certificate, what their rows say of them, the claims, the floor, the effort. Every
use looks at these rows again, and only equal ones are given again: a better plan or bound, an eviction, a flipped bit,
a solve under way, whoever wrote it, is a difference, and the long way is taken. API keys are looked up before; a
revoked one gets here no more. What is remembered of a GET (`given`) is the answer of an id, and every use compares the
whole row.

Bound: REMAT_RECALL_BYTES, and a quarter of it for ids, each text counted for every answer that shares it.
Invalidation: none is needed, since each use looks.
Gain, of processor time at 300 ops: a body seen before takes 0.5 ms, another one about a known problem 1.1; a GET takes
0.31 instead of 0.39 ms.

The rows of answers from memory are written to the database a moment later, many in one transaction (`WriteBehind`).
Where this process is the only one (SQLite), whoever asks for such a request by its id waits for the write. Where
several share the database, another may be asked at once, so each row is written before its answer goes out. A crash
loses the rows of the last moment: answers that their callers have, and can have again with another POST.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import structlog
from sqlalchemy import Column, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, AnswerVerdict, AnyPlan, Problem, Status, Verdict, certified_need, gap_of
from remat_ir.proof import certain_need, certifiable
from remat_solver import Bound, Ending, Known, claim_sentence, sentence

from ..clock import Clock
from ..identity import Caller, Keys, Retry
from ..memory import Lru
from ..telemetry import Metrics
from .database import Database, Outage
from .seals import Claim, Effort, Seals, names, signed_text
from .store import EndedRequest, Row, Snapshot, Store, StoredPlan
from .tables import requests, tenants
from .verifier import CheckedProof

log = structlog.get_logger("remat_service.storage.answers")

_ID = secrets.token_hex(16)  # in the place of each request's own
_ROW_BYTES = 4_000  # what an answer takes besides its plan and its certificate

_SOON_S = 0.05
_MOST_ROWS = 2_000


@dataclass(frozen=True)
class Stored:
    """Everything that the store has about one problem for one method, in net bytes.

    `proof`, and `inside` of the method's own space, are checked on this problem. `near` is a plan of a graph with other
    costs, verified on this one, that is not in the store under this graph yet; `carried` says that something came from
    such a graph; `partial`, that the time was too short for some certificate. `snapshot` is what all of it rests on.
    `unsound` are rows that were passed over: damaged, or of a smaller space than the method searches by now. `refuting`
    is what a verified plan costs and needs that shows others to be wrong.
    """

    problem: Problem
    snapshot: Snapshot | None = None
    plan: StoredPlan | None = None
    near: tuple[AnyPlan, Verdict] | None = None
    proof: CheckedProof | None = None
    inside: CheckedProof | None = None
    claim: Claim | None = None
    restricted: Claim | None = None
    least_bytes: int | None = None
    enough_bytes: int | None = None
    effort: Effort | None = None
    carried: bool = False
    partial: bool = False
    certify: bool = True
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
        if self.inside is not None and self.inside.bound_ns is not None:
            known = known.with_bound(Bound(self.inside.bound_ns, names(self.inside.space)))
        if self.restricted is not None:
            known = known.with_bound(Bound(self.restricted.bound_ns, names(self.restricted.restricted_to)))
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
    def uses_near(self) -> bool:
        """Whether the better plan is the near one."""
        return self.near is not None and (self.plan is None or self.near[1].cost_ns < self.plan.cost_ns)

    def certificate(self, within: Sequence[str]) -> tuple[CheckedProof | None, str | None]:
        """The certificate of an answer with a bound in this space, and its row where that is for exactly this problem.

        An answer in a space of which none is known has that of the whole space.
        """
        proof = self.inside if within and self.inside is not None else self.proof
        if proof is None or self.snapshot is None:
            return proof, None
        look = self.snapshot
        found = look.inside if proof is self.inside else look.too_small if self.proves_none else look.proof
        return proof, found.id if found is not None and found.data == proof.data else None

    @property
    def source(self) -> str:
        """What an answer of it says of the cache: "near" where something came from a graph with other costs."""
        return "near" if self.carried else "hit"

    def is_final(self, max_gap: float, time_limit_s: float) -> bool:
        """Whether what is known answers a request, by the rules above."""
        effort, cost_ns = self.effort, self.known.cost_ns
        if self.partial:  # more is proved than is known yet
            return cost_ns is not None and self.known.settled(max_gap)
        if self.known.infeasible and self.certify and certifiable(self.problem.subject) and not self.proves_none:
            # claimed only: a solve certifies it, if that was not tried already
            return effort is not None and (effort.status == Status.INFEASIBLE or effort.settled)
        if self.known.settled(max_gap):
            return True
        if effort is None or effort.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return False  # what proved it is gone
        if cost_ns is None and effort.status != Status.NOTHING_FOUND:
            return False  # the plan that the effort found is gone
        if effort.settled or effort.seconds >= time_limit_s:
            return True
        if effort.limit is not None or self.claim is None or cost_ns is None:
            return False
        # it ended since this claim was enough and could not be certified
        return gap_of(cost_ns, min(self.claim.bound_ns, cost_ns)) <= max_gap

    def answer(self, method: str, max_gap: float, digest: str) -> Answer:
        """What is known as an answer, in net bytes, without its plan; its sentence only where the effort left one."""
        effort, known = self.effort, self.known
        if effort is None:
            return self.with_claims(replace(known.answer(method, max_gap, digest=digest), message=""))
        ending = Ending(effort.limit, names(effort.restricted_to) or None)
        answer = known.answer(method, max_gap, ending, seconds=effort.seconds, digest=digest)
        own = known.cost_ns is None and (not known.infeasible or effort.status == Status.INFEASIBLE)
        return self.with_claims(replace(answer, message=effort.message if own else ""))

    def with_claims(self, answer: Answer) -> Answer:
        """An answer made from what is known, that says what of it has no certificate, and who claims that."""
        least = certain_need(self.problem.subject)  # looked up beforehand, if it takes long (`Cache.known`)
        if self.proves_none and self.snapshot is not None and self.snapshot.too_small is not None:
            least = max(least, self.snapshot.too_small.budget_bytes + 1)
        elif self.proves_none:
            least = max(least, self.problem.budget_bytes + 1)
        answer = certified_need(answer, AnswerVerdict(None, None, 0, least > self.problem.budget_bytes, least))
        if answer.status is Status.INFEASIBLE:
            return answer
        proved = self.problem.subject.total_cost_ns
        for proof in (self.proof, self.inside if answer.restricted_to else None):
            if proof is not None and proof.bound_ns is not None:
                proved = max(proved, proof.bound_ns)
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


def head_of(data: dict[str, Any]) -> bytes:
    """An answer object without its plan and its certificate, as JSON text."""
    return json.dumps(data, separators=(",", ":")).encode()


def spliced(head: bytes, plan_text: bytes | None, proof_text: bytes | None) -> bytes:
    """The body of a response: a head with the texts of a certificate and of a plan as its last members."""
    parts = [head[:-1]]
    if proof_text is not None:
        parts += (b',"proof":', proof_text)
    if plan_text is not None:
        parts += (b',"plan":', plan_text)
    return b"".join((*parts, b"}"))


class Given(NamedTuple):
    """An answer that was given, and the row that it was made from, whole: an equal row is given the same answer.

    The texts of plan and certificate are those that the verifier holds.
    """

    found: EndedRequest
    head: bytes
    plan: bytes | None
    proof: bytes | None

    @property
    def size(self) -> int:
        """Bytes, the texts of plan and certificate counted for each request that shares them."""
        parts = (self.head, self.plan, self.proof, self.found.data, self.found.proof)
        return 2_000 + sum(len(part) for part in parts if part)


class CachedResponse(NamedTuple):
    """A remembered hit: what it rests on, its row of `requests` but for what is each request's own, the texts of its
    answer and of what is sealed of that row, cut where the request's id stands, the texts of its plan and of its
    certificate, which answers of one problem share.
    """

    snapshot: Snapshot
    keys: Keys
    row: dict[str, Any]
    head: list[bytes]
    signed: list[str]
    plan: bytes | None
    proof: bytes | None


class ResponseCache:
    """A memory bounded in bytes.

    Attributes:
        given: what was answered by id.
    """

    def __init__(
        self, store: Store, write_behind: WriteBehind, seals: Seals, clock: Clock, metrics: Metrics, most_bytes: int
    ) -> None:
        self._store, self._write_behind, self._seals = store, write_behind, seals
        self._clock, self._metrics = clock, metrics
        self._responses: Lru[tuple[str, str, int, bytes], CachedResponse] = Lru(most_bytes)
        self.given: Lru[str, Given] = Lru(most_bytes // 4)

    async def get(self, caller: Caller, body: bytes, retry: Retry | None) -> bytes | None:
        """The answer to a body of this SHA-256 under a fresh id, if it is remembered and still stands."""
        key = (caller.tenant_id, caller.scope_id, caller.epoch, body)
        held = self._responses.get(key)
        if held is None or (retry is not None and await self.came_before(caller, retry)):
            return None
        if await self._store.snapshot(held.keys, held.row["budget_bytes"]) != held.snapshot:
            self._responses.drop(key)
            return None
        return await self.give(caller, held, retry)

    async def give(self, caller: Caller, held: CachedResponse, retry: Retry | None) -> bytes:
        """The answer under a fresh id, its row on its way; for who has just looked at what it rests on."""
        moment = self._clock.now()
        new_id = self._clock.new_id()
        row = {**held.row, "id": new_id, "created_at": moment, "ended_at": moment}
        row["answer"] = {**held.row["answer"], "id": new_id}
        row["seal"] = self._seals.seal(new_id.join(held.signed))
        if retry is not None:
            row |= {"idempotency_key": retry.key, "body_hash": retry.body_hash}
        await self._write_behind.add(row)
        self._metrics.saved_seconds.labels(caller.tenant).inc(row["answer"]["seconds"])
        self._metrics.saved_bytes.labels(caller.tenant).inc(held.snapshot.saved_bytes)
        return spliced(new_id.encode().join(held.head), held.plan, held.proof)

    async def came_before(self, caller: Caller, retry: Retry) -> bool:
        """Whether a request of this idempotency key is there, or on its way."""
        here = self._write_behind.holds_key(caller.tenant_id, retry.key)
        return here or await self._store.has_idempotency_key(caller.tenant_id, retry.key)

    def put(
        self, caller: Caller, body: bytes, keys: Keys, row: dict[str, Any], known: Stored, plan: bytes | None
    ) -> CachedResponse | None:
        """Remember a hit, unless its plan or its certificate is not the one that its snapshot names.

        Args:
            plan: its text, where there is a plan.
        """
        found = known.snapshot
        if found is None or found.under_way or known.plan != found.plan or (plan is None) != (known.plan is None):
            return None
        proof, stored = known.certificate(row["answer"].get("restricted_to", ()))
        if proof is not None and stored is None:  # carried over just now: stored, the next look finds it
            return None
        own = dict.fromkeys(("idempotency_key", "body_hash", "created_at", "ended_at", "seal"))
        row = {**row, **own, "id": _ID, "answer": {**row["answer"], "id": _ID}}
        text = None if proof is None else proof.text
        head, signed = head_of(row["answer"]).split(_ID.encode()), signed_text("requests", row).split(_ID)
        held = CachedResponse(found, keys, row, head, signed, plan, text)
        size = _ROW_BYTES + len(plan or b"") + len(text or b"")
        self._responses.put((caller.tenant_id, caller.scope_id, caller.epoch, body), held, size)
        return held


class WriteBehind:
    """Rows of `requests` on their way into the database."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database, self._store = database, store
        self._rows: dict[str, dict[str, Any]] = {}
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def add(self, row: dict[str, Any]) -> None:
        """Take a row; it is written before this returns, or soon."""
        self._rows[row["id"]] = row
        if not self._database.is_sqlite or len(self._rows) >= _MOST_ROWS:
            await self.flush()
        elif self._task is None:
            self._task = asyncio.create_task(self._soon())

    def holds(self, request_id: str) -> bool:
        """Whether the row of a request is still on its way."""
        return request_id in self._rows

    def holds_key(self, tenant_id: str, key: str) -> bool:
        """Whether a row with this idempotency key is still on its way."""
        return any(row["idempotency_key"] == key and row["tenant_id"] == tenant_id for row in self._rows.values())

    async def flush(self) -> None:
        """Write what was taken up to now."""
        async with self._writing:
            rows = list(self._rows.values())
            if not rows:
                return
            try:
                async with self._database.write() as connection:
                    await connection.execute(requests.insert(), rows)
                    await self._touch(connection, rows)
            except IntegrityError:
                async with self._database.write() as connection:
                    await self._insert_what_can_be(connection, rows)
                    await self._touch(connection, rows)
            for row in rows:
                self._rows.pop(row["id"], None)

    async def _insert_what_can_be(self, connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
        """Write what is not there yet: an attempt before may have been committed and not heard of.

        A row whose idempotency key another one has, since a retry came in twice at once, is written without it; one of
        a tenant that is gone is left out.
        """
        tenants_there = await _among(connection, tenants.c.id, {row["tenant_id"] for row in rows})
        rows = [row for row in rows if row["tenant_id"] in tenants_there]
        if not rows:
            return
        await connection.execute(self._database.insert_new(requests), rows)
        there = await _among(connection, requests.c.id, {row["id"] for row in rows})
        others = [row | {"idempotency_key": None, "body_hash": None} for row in rows if row["id"] not in there]
        if others:
            await connection.execute(requests.insert(), others)

    async def _touch(self, connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
        for graph_key, plan_id in sorted({(row["graph_key"], row["plan_id"] or "") for row in rows}):
            await self._store.touch(connection, graph_key, plan_id or None)

    async def _soon(self) -> None:
        outage = Outage(log, "writing requests down")
        while self._rows:
            await asyncio.sleep(_SOON_S)
            with outage:
                await self.flush()
        self._task = None

    async def close(self) -> None:
        """Write what is left."""
        if self._task is not None:
            self._task.cancel()
        await self.flush()


async def _among(connection: AsyncConnection, column: Column[str], values: set[str]) -> set[str]:
    """Those of the values that a table has."""
    return set(await connection.scalars(select(column).where(column.in_(values))))
