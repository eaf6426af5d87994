"""Answers lately given, given again without parsing, planning or verifying.

What is remembered is a hit, under its caller's tenant, scope and epoch and the SHA-256 of the body as sent. With it is
remembered all that it rests on (`snapshot.Snapshot`): the stored bytes of its plan, what the row claims of them, the
bounds, the floor, the effort. Every use looks at these rows again, and only equal ones are given again: a better plan
or bound, an eviction, a flipped bit, a solve under way, whoever wrote it, is a difference, and then the long way is
taken. API keys are looked up before; a revoked one gets here no more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..identity import Caller, Retry, new_id
from ..lru import Lru
from .answers import rendered
from .cache_key import Keys
from .packing import checksum
from .snapshot import Snapshot, SnapshotReader
from .store import StoredPlan
from .tables import now
from .verifier import Verifier
from .write_behind import WriteBehind

_ROW_BYTES = 2_000  # what an answer takes besides its plan


class CachedResponse(NamedTuple):
    """A remembered hit: what it rests on, and its row of `requests` but for what is each request's own."""

    snapshot: Snapshot
    keys: Keys
    net_budget: int
    row: dict[str, Any]
    checksum: str | None


class ResponseCache:
    """A memory bounded in bytes."""

    def __init__(
        self, snapshots: SnapshotReader, verifier: Verifier, write_behind: WriteBehind, most_bytes: int
    ) -> None:
        self._snapshots, self._verifier, self._write_behind = snapshots, verifier, write_behind
        self._responses: Lru[tuple[str, str, int, bytes], CachedResponse] = Lru(most_bytes)

    async def get(self, caller: Caller, body: bytes, retry: Retry | None) -> bytes | None:
        """The answer to a body of this SHA-256 under a fresh id, if it is remembered and still stands."""
        key = (caller.tenant_id, caller.scope_id, caller.epoch, body)
        held = self._responses.get(key)
        if held is None or (retry is not None and await self._came_before(caller, retry)):
            return None
        text = None if held.checksum is None else self._verifier.held(held.checksum)
        stands = await self._snapshots.read(held.keys, held.net_budget) == held.snapshot
        if not stands or (text is None and held.checksum is not None):
            self._responses.drop(key)
            return None
        moment = now()
        row = {**held.row, "id": new_id(), "created_at": moment, "ended_at": moment}
        row["answer"] = {**held.row["answer"], "id": row["id"]}
        if retry is not None:
            row |= {"idempotency_key": retry.key, "body_hash": retry.body_hash}
        await self._write_behind.add(row)
        return rendered(row["answer"], text)

    async def _came_before(self, caller: Caller, retry: Retry) -> bool:
        here = self._write_behind.holds_key(caller.tenant_id, retry.key)
        return here or await self._snapshots.has_idempotency_key(caller.tenant_id, retry.key)

    def put(
        self, caller: Caller, body: bytes, keys: Keys, row: dict[str, Any], plan: StoredPlan | None, snapshot: Snapshot
    ) -> None:
        """Remember a hit, unless its plan is not the one that the snapshot, looked at before, names."""
        if snapshot.under_way or not _rests_on(plan, snapshot):
            return
        own = {"id": "", "idempotency_key": None, "body_hash": None, "created_at": None, "ended_at": None}
        digest = None if plan is None else checksum(plan.data)
        held = CachedResponse(snapshot, keys, row["budget_bytes"], {**row, **own}, digest)
        size = _ROW_BYTES + (0 if plan is None else len(plan.data))
        self._responses.put((caller.tenant_id, caller.scope_id, caller.epoch, body), held, size)


def _rests_on(plan: StoredPlan | None, found: Snapshot) -> bool:
    return plan == (None if plan is None else found.plan(plan.graph_key)) and (plan is None) == (found.plan_id is None)
