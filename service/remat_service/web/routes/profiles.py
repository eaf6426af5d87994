"""`/v1/profiles`: measured costs of ops, shared so that two jobs of one step send the same graph.

The table holds, by device and op signature, the ns and workspace bytes that several tenants report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import Any

import structlog
from fastapi import APIRouter, Request
from sqlalchemy import Table, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import InvalidData
from remat_ir.document import Array, Document, Integer, Member, Text
from remat_ir.read import array, escape, integer, kind

from ...context import Context
from ...identity import Caller
from ...storage.tables import profile_reports, profiles, tenants
from ...tenants.quotas import check_profiles
from ..authentication import Here, Reader, Solver
from ..body import read_document
from ..schemas import ProfileTable, body, examples, refusals

_BATCH = 500  # rows a statement: SQLite allows 32,766 variables
_REPORTS = 3
"""Reports whose middle one tenant alone cannot decide."""
_APART = 1.3
"""Times by which what stands may differ from the middle, as a client doubts a table: runs of one kernel mostly differ
by less, and a changed cost is another graph to the cache."""

log = structlog.get_logger("remat_service.web.profiles")

_MOST_ROWS = 100_000
_NAME = Text(longest=500)
_MEASURED = ("cost_ns", "workspace_bytes")


class _Table:
    """An object whose keys are signatures, each with an array of the integers in `_MEASURED`."""

    def read(self, value: object, what: str, pointer: str) -> dict[str, tuple[int, ...]]:
        """As a dictionary of tuples."""
        if not isinstance(value, Mapping):
            raise InvalidData(f"{what} must be an object, not {kind(value)}", pointer)
        if len(value) > _MOST_ROWS:
            raise InvalidData(f"{what} has {len(value)} entries, more than the {_MOST_ROWS} allowed", pointer)
        return {
            _NAME.read(key, "signature", pointer): self._profile(
                entry, f"profile {key[:60]!r}", f"{pointer}/{escape(key)[:100]}"
            )
            for key, entry in value.items()
        }

    def _profile(self, value: object, what: str, pointer: str) -> tuple[int, ...]:
        items = array(value, what, pointer)
        if len(items) != len(_MEASURED):
            raise InvalidData(f"{what} must be [{', '.join(_MEASURED)}]", pointer)
        named = enumerate(zip(_MEASURED, items, strict=True))
        return tuple(integer(item, f"{what}: {name}", f"{pointer}/{i}") for i, (name, item) in named)

    def schema(self) -> dict[str, Any]:
        """The JSON Schema."""
        return {
            "type": "object",
            "additionalProperties": Array(Integer(), len(_MEASURED), len(_MEASURED)).schema(),
            "maxProperties": _MOST_ROWS,
            "propertyNames": {name: limit for name, limit in _NAME.schema().items() if name != "type"},
        }


LOOKUP = Document(
    "ProfileLookup",
    "request",
    "Which measured costs are wanted.",
    {"device": Member(_NAME), "signatures": Member(Array(_NAME, longest=_MOST_ROWS))},
)
UPLOAD = Document(
    "ProfileUpload",
    "request",
    "Measured costs: signature → [ns, workspace bytes]. What stands stays unless reports contradict it.",
    {"device": Member(_NAME), "profiles": Member(_Table())},
)


async def look_up(context: Context, caller: Caller, device: str, signatures: Sequence[str]) -> dict[str, list[int]]:
    """What stands for these signatures in the caller's scope."""
    wanted = sorted(set(signatures))
    found: dict[str, list[int]] = {}
    async with context.database.read() as connection:
        for start in range(0, len(wanted), _BATCH):
            sound, _ = await _read(context, connection, profiles, caller, device, wanted[start : start + _BATCH])
            found |= {row.signature: [row.cost_ns, row.workspace_bytes] for row in sound}
    return found


async def _read(
    context: Context, connection: AsyncConnection, rows: Table, caller: Caller, device: str, signatures: Sequence[str]
) -> tuple[list[Any], list[Any]]:
    """The rows of a scope about some signatures: those that are what was stored, and those that are not."""
    here = (rows.c.scope_id == caller.scope_id, rows.c.device == device, rows.c.signature.in_(signatures))
    sound: list[Any] = []
    damaged: list[Any] = []
    for row in await connection.execute(select(rows).where(*here)):
        (sound if context.seals.holds(rows.name, dict(row._mapping)) else damaged).append(row)
    for row in damaged:
        context.metrics.damaged.labels("profile").inc()
        log.error("a stored profile is damaged and is not believed", device=device, signature=row.signature)
    return sound, damaged


async def _drop(connection: AsyncConnection, rows: Table, damaged: Sequence[Any]) -> None:
    for row in damaged:
        await connection.execute(delete(rows).where(*(c == row._mapping[c.name] for c in rows.primary_key.columns)))


async def put(context: Context, caller: Caller, device: str, table: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    """Take a tenant's reports in; returns what now stands for every signature given.

    The first report stands, so that all who share the table plan the same graph, until later ones contradict it: until
    it is more than `_APART` times away from what `_middle` makes of the latest report of each tenant.

    Raises:
        RateLimited: over the tenant's quota; nothing was taken in.
    """
    if not table:
        return {}
    moment, signatures = context.clock.now(), sorted(table)
    async with context.database.write() as connection:
        await check_profiles(connection, caller, device, signatures)
        for start in range(0, len(signatures), _BATCH):
            batch = signatures[start : start + _BATCH]
            rows = [
                {
                    "scope_id": caller.scope_id,
                    "device": device,
                    "signature": signature,
                    "cost_ns": table[signature][0],
                    "workspace_bytes": table[signature][1],
                    "created_at": moment,
                }
                for signature in batch
            ]
            for kind in (profiles, profile_reports):
                await _drop(connection, kind, (await _read(context, connection, kind, caller, device, batch))[1])
            insert = context.database.insert(profiles).values([context.seals.sealed("profiles", row) for row in rows])
            await connection.execute(insert.on_conflict_do_nothing())
            reports = [context.seals.sealed("profile_reports", row | {"tenant_id": caller.tenant_id}) for row in rows]
            changed = ("cost_ns", "workspace_bytes", "created_at", "seal")
            await connection.execute(context.database.upsert(profile_reports, reports, changed))
            await _correct(context, connection, caller, device, batch)
    return await look_up(context, caller, device, signatures)


async def _correct(
    context: Context, connection: AsyncConnection, caller: Caller, device: str, signatures: Sequence[str]
) -> None:
    """Put the middle of the reports in place of what stands far from it.

    A tenant whose table nobody shares corrects it alone, where it measures less than before.
    """
    sharing = select(func.count()).select_from(tenants).where(tenants.c.scope_id == caller.scope_id)
    own = await connection.scalar(sharing) == 1
    reports: dict[str, list[Any]] = {}
    for row in (await _read(context, connection, profile_reports, caller, device, signatures))[0]:
        reports.setdefault(row.signature, []).append(row)
    for row in (await _read(context, connection, profiles, caller, device, signatures))[0]:
        told = reports.get(row.signature, [])
        cost_ns = _middle([report.cost_ns for report in told], row.cost_ns)
        if own and len(told) == 1:  # other work on a machine only ever adds to what is measured there
            cost_ns = min(told[0].cost_ns, row.cost_ns)
        workspace_bytes = _middle([report.workspace_bytes for report in told], row.workspace_bytes)
        if _apart(row.cost_ns, cost_ns) or _apart(row.workspace_bytes, workspace_bytes):
            log.warning("a profile that stood apart is replaced", signature=row.signature, reports=len(told))
            await connection.execute(
                update(profiles)
                .where(*(profiles.c[name] == row._mapping[name] for name in ("scope_id", "device", "signature")))
                .values(
                    context.seals.sealed(
                        "profiles", {**row._mapping, "cost_ns": cost_ns, "workspace_bytes": workspace_bytes}
                    )
                )
            )


def _middle(told: Sequence[int], stands: int) -> int:
    """What the latest reports of several tenants come to: the median of three or more, two that agree, or what stands.

    >>> _middle([100, 110, 9000], 9000), _middle([300, 310], 4000), _middle([4000, 300], 4000)
    (110, 310, 4000)
    """
    decided = len(told) >= _REPORTS or (len(told) == 2 and not _apart(*told))
    return median_high(told) if decided else stands


def _apart(stands: int, middle: int) -> bool:
    return max(stands, middle) > _APART * min(stands, middle)


router = APIRouter(tags=["profiles"])


@router.post(
    "/v1/profiles:lookup",
    summary="Look measured costs up",
    response_model=ProfileTable,
    responses=refusals(408, 413, 415),
    openapi_extra=body(LOOKUP, examples()["profile_lookup"]),
)
async def lookup_profiles(request: Request, context: Here, caller: Reader) -> Any:
    """Those of the signatures that are known for the device."""
    found = await read_document(request, LOOKUP)
    return {"profiles": await look_up(context, caller, found["device"], found["signatures"])}


@router.post(
    "/v1/profiles",
    summary="Share measured costs",
    response_model=ProfileTable,
    responses=refusals(408, 413, 415),
    openapi_extra=body(UPLOAD, examples()["profile_upload"]),
)
async def put_profiles(request: Request, context: Here, caller: Solver) -> Any:
    """The first report of a signature stands until later ones contradict it; the reply is what now stands."""
    found = await read_document(request, UPLOAD)
    return {"profiles": await put(context, caller, found["device"], found["profiles"])}
