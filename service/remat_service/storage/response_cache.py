"""Answers lately given, given again without parsing, planning or verifying: the second of the three caches.

What is remembered of a POST is a hit, under its caller's tenant, scope and epoch and the SHA-256 of the body as sent.
With it is remembered all that it rests on (`snapshot.Snapshot`): the stored bytes of its plan and of its certificate,
what their rows say of them, the claims, the floor, the effort. Every use looks at these rows again, and only equal ones
are given again: a better plan or bound, an eviction, a flipped bit, a solve under way, whoever wrote it, is a
difference, and the long way is taken. API keys are looked up before; a revoked one gets here no more. What is
remembered of a GET (`given`) is the answer of an id, and every use compares the whole row.

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
import secrets
from typing import Any, NamedTuple

import structlog
from sqlalchemy import Column, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from ..clock import Clock
from ..identity import Caller, Retry
from ..memory import Lru
from ..metrics import Metrics
from ..outage import Outage
from .answers import Stored, head_of, spliced
from .cache_key import Keys
from .database import Database
from .seals import Seals, signed_text
from .snapshot import Given, Snapshot, SnapshotReader
from .store import Store
from .tables import requests, tenants

log = structlog.get_logger("remat_service.storage.response_cache")

_ID = secrets.token_hex(16)  # in the place of each request's own
_ROW_BYTES = 4_000  # what an answer takes besides its plan and its certificate

_SOON_S = 0.05
_MOST_ROWS = 2_000


class CachedResponse(NamedTuple):
    """A remembered hit: what it rests on, its row of `requests` but for what is each request's own, the texts of its
    answer and of what is sealed of that row, cut where the request's id stands, the texts of its plan and of its
    certificate, which answers of one problem share.
    """

    snapshot: Snapshot
    keys: Keys
    net_budget: int
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
        self,
        snapshots: SnapshotReader,
        write_behind: WriteBehind,
        seals: Seals,
        clock: Clock,
        metrics: Metrics,
        most_bytes: int,
    ) -> None:
        self._snapshots, self._write_behind, self._seals = snapshots, write_behind, seals
        self._clock, self._metrics = clock, metrics
        self._responses: Lru[tuple[str, str, int, bytes], CachedResponse] = Lru(most_bytes)
        self.given: Lru[str, Given] = Lru(most_bytes // 4)

    async def get(self, caller: Caller, body: bytes, retry: Retry | None) -> bytes | None:
        """The answer to a body of this SHA-256 under a fresh id, if it is remembered and still stands."""
        key = (caller.tenant_id, caller.scope_id, caller.epoch, body)
        held = self._responses.get(key)
        if held is None or (retry is not None and await self.came_before(caller, retry)):
            return None
        if await self._snapshots.read(held.keys, held.net_budget) != held.snapshot:
            self._responses.drop(key)
            return None
        return await self.give(caller, held, retry)

    async def give(self, caller: Caller, held: CachedResponse, retry: Retry | None) -> bytes:
        """The answer under a fresh id, its row on its way; for who has just looked at what it rests on."""
        moment = self._clock.now()
        new_id = self._clock.new_id()
        row = {**held.row, "id": new_id, "created_at": moment, "ended_at": moment}
        row["answer"] = {**held.row["answer"], "id": new_id}
        row["seal"] = self._seals.seal(new_id.join(held.signed)) if held.signed else None
        if retry is not None:
            row |= {"idempotency_key": retry.key, "body_hash": retry.body_hash}
        await self._write_behind.add(row)
        self._metrics.saved_seconds.labels(caller.tenant).inc(row["answer"]["seconds"])
        return spliced(new_id.encode().join(held.head), held.plan, held.proof)

    async def came_before(self, caller: Caller, retry: Retry) -> bool:
        """Whether a request of this idempotency key is there, or on its way."""
        here = self._write_behind.holds_key(caller.tenant_id, retry.key)
        return here or await self._snapshots.has_idempotency_key(caller.tenant_id, retry.key)

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
        if known.proof is not None and known.proof_id is None:  # carried over just now: stored, the next look finds it
            return None
        own = {
            "id": _ID,
            "idempotency_key": None,
            "body_hash": None,
            "created_at": None,
            "ended_at": None,
            "seal": None,
        }
        row = {**row, **own, "answer": {**row["answer"], "id": _ID}}
        proof = None if known.proof is None else known.proof.text
        held = CachedResponse(
            found,
            keys,
            row["budget_bytes"],
            row,
            head_of(row["answer"]).split(_ID.encode()),
            signed_text("requests", row).split(_ID) if self._seals.signs else [],
            plan,
            proof,
        )
        size = _ROW_BYTES + len(plan or b"") + len(proof or b"")
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
            try:
                await self.flush()
                outage.over()
            except Exception as error:
                outage.failed(error)
        self._task = None

    async def close(self) -> None:
        """Write what is left."""
        if self._task is not None:
            self._task.cancel()
        await self.flush()


async def _among(connection: AsyncConnection, column: Column[str], values: set[str]) -> set[str]:
    """Those of the values that a table has."""
    return set(await connection.scalars(select(column).where(column.in_(values))))
