"""What one tenant may use: solves at once, solver seconds a day, and what is kept for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import readable

from ..errors import Conflict, Forbidden, RateLimited
from ..identity import Caller
from ..storage.eviction import drop_oldest, rows_bytes
from ..storage.tables import attachments, graphs, plans, profile_reports, requests, solves, tenants

QUOTAS = ("most_running", "most_queued", "most_solver_seconds", "most_stored_bytes", "most_requests", "most_profiles")
"""Columns of `tenants`; null is no limit."""
_DAY = timedelta(days=1)
_BATCH = 500
_LIMITS = select(tenants).where(tenants.c.id == bindparam("tenant")).with_for_update(key_share=True)


async def check_quota(connection: AsyncConnection, caller: Caller, moment: datetime) -> None:
    """Refuse another solve over the tenant's quota; hits and joins cost nothing and are never refused.

    `most_running` is not looked at here: it holds a solve in the queue, it does not refuse it.

    Raises:
        RateLimited: with the seconds after which it is worth asking again.
        Forbidden: the tenant has been disabled meanwhile.
    """
    limits = await _limits(connection, caller)
    mine = solves.c.tenant_id == caller.tenant_id
    if limits.most_queued is not None:
        queued = await _count(connection, select(solves.c.id).where(mine, solves.c.state == "queued"))
        if queued >= limits.most_queued:
            raise RateLimited(f"{queued} solves are queued, the most for this tenant", retry_after_s=10)
    if limits.most_solver_seconds is not None:
        since = moment - _DAY
        used = select(func.coalesce(func.sum(solves.c.spent_s), 0.0), func.min(solves.c.queued_at))
        spent, first = (await connection.execute(used.where(mine, solves.c.queued_at >= since))).one()
        if spent >= limits.most_solver_seconds:
            wait = max(1, int((first - since).total_seconds())) if first is not None else 60
            raise RateLimited(
                f"{spent:.0f} solver seconds were used in the last day, of {limits.most_solver_seconds:g}",
                retry_after_s=wait,
            )
    if limits.most_requests is not None:
        asked = select(requests.c.id).where(requests.c.tenant_id == caller.tenant_id, requests.c.ended.is_(False))
        under_way = await _count(connection, asked)  # ended ones make room: see below
        if under_way >= limits.most_requests:
            raise RateLimited(
                f"{under_way} requests are under way, and {limits.most_requests} are kept for this tenant",
                retry_after_s=10,
            )
    await check_stored_bytes(connection, caller, limits)


async def check_stored_bytes(connection: AsyncConnection, caller: Caller, limits: Any = None) -> None:
    """Refuse to store more for a tenant that has its quota of bytes.

    Args:
        limits: its row, where that was read and locked already.

    Raises:
        RateLimited: as `check_quota`.
    """
    limits = limits or await _limits(connection, caller)
    if limits.most_stored_bytes is not None:
        stored = await stored_bytes(connection, caller.tenant_id)
        if stored >= limits.most_stored_bytes:
            raise RateLimited(
                f"{readable(stored)} of graphs and plans are stored for this tenant; its quota is "
                f"{readable(limits.most_stored_bytes)}",
                retry_after_s=60,
            )


async def check_profiles(connection: AsyncConnection, caller: Caller, device: str, signatures: Sequence[str]) -> None:
    """Refuse profiles over the tenant's quota, all of them or none; those that it has reported before are replaced.

    Raises:
        RateLimited: as `check_quota`.
    """
    limits = await _limits(connection, caller)
    if limits.most_profiles is None:
        return
    of_tenant = select(profile_reports.c.signature).where(profile_reports.c.tenant_id == caller.tenant_id)
    known = {
        row.signature
        for start in range(0, len(signatures), _BATCH)
        for row in await connection.execute(
            of_tenant.where(
                profile_reports.c.device == device,
                profile_reports.c.signature.in_(signatures[start : start + _BATCH]),
            )
        )
    }
    kept = await _count(connection, of_tenant) + len(set(signatures) - known)
    if kept > limits.most_profiles:
        raise RateLimited(
            f"{kept} profiles would be kept, the most for this tenant is {limits.most_profiles}", retry_after_s=3600
        )


async def trim_requests(connection: AsyncConnection) -> int:
    """Forget the oldest ended requests of tenants above their quota: answers from the store add to them unasked."""
    limited = select(tenants.c.id, tenants.c.most_requests).where(tenants.c.most_requests.is_not(None))
    gone = 0
    for tenant in (await connection.execute(limited)).all():
        mine = requests.c.tenant_id == tenant.id
        over = await _count(connection, select(requests.c.id).where(mine)) - tenant.most_requests
        if over > 0:
            gone += await drop_oldest(connection, over, mine, requests.c.ended.is_(True))
    return gone


async def stored_bytes(connection: AsyncConnection, tenant_id: str) -> int:
    """Bytes of the graphs that a tenant's requests name, with their plans, and of what was said of them since."""
    named = select(requests.c.graph_key).where(requests.c.tenant_id == tenant_id)
    mine = select(requests.c.id).where(requests.c.tenant_id == tenant_id)
    return (
        await rows_bytes(connection, attachments, attachments.c.request_id.in_(mine))
        + await rows_bytes(connection, graphs, graphs.c.key.in_(named))
        + await rows_bytes(connection, plans, plans.c.graph_key.in_(named))
    )


async def _limits(connection: AsyncConnection, caller: Caller) -> Any:
    """The tenant's row, locked to the end of the transaction: what one tenant asks for is counted in turn."""
    row = (await connection.execute(_LIMITS, {"tenant": caller.tenant_id})).one()
    if row.disabled:  # its keys are refused, and a search of its own asks on without one
        raise Forbidden("this tenant has been disabled")
    if row.scope_id != caller.scope_id:
        raise Conflict("this tenant has just joined or left a sharing group; ask again", retry_after_s=2)
    return row


async def _count(connection: AsyncConnection, query: Any) -> int:
    return int(await connection.scalar(select(func.count()).select_from(query.subquery())) or 0)
