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
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

from ..clock import Clock
from ..identity import Caller, Retry
from ..lru import Lru
from ..metrics import Metrics
from .answers import head_of, spliced
from .cache import Stored
from .cache_key import Keys
from .seals import Seals, signed_text
from .snapshot import Given, Snapshot, SnapshotReader
from .write_behind import WriteBehind

_ID = secrets.token_hex(16)  # in the place of each request's own
_ROW_BYTES = 4_000  # what an answer takes besides its plan and its certificate


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
        row["seal"] = self._seals.seal(new_id.join(held.signed))
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
            signed_text("requests", row).split(_ID),
            plan,
            proof,
        )
        size = _ROW_BYTES + len(plan or b"") + len(proof or b"")
        self._responses.put((caller.tenant_id, caller.scope_id, caller.epoch, body), held, size)
        return held
