"""What an operator sees and ends: solves of all tenants, what waits, who works."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import case, distinct, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_solver import solver_version

from ..context import Context
from ..storage.eviction import store_bytes
from ..storage.tables import requests, solves, tenants

STATES = ("queued", "running", "ended")
_ALIVE = text("SELECT count(*) FROM procrastinate_workers WHERE last_heartbeat > now() - make_interval(secs => :limit)")


async def queue_by_tenant(context: Context, connection: AsyncConnection) -> list[dict[str, Any]]:
    """Of each tenant that has asked for anything: what waits, what runs, since when, and its seconds of solving."""
    waits, runs = solves.c.state == "queued", solves.c.state == "running"
    query = (
        select(
            tenants.c.name,
            func.count().filter(waits).label("queued"),
            func.count().filter(runs).label("running"),
            func.min(case((waits, solves.c.queued_at))).label("oldest"),
            func.sum(solves.c.spent_s).label("solver_seconds"),
        )
        .join(solves, solves.c.tenant_id == tenants.c.id)
        .group_by(tenants.c.name)
        .order_by(tenants.c.name)
    )
    found = []
    for row in await connection.execute(query):
        oldest = None if row.oldest is None else max(0.0, (context.clock.now() - row.oldest).total_seconds())
        found.append(
            {
                "tenant": row.name,
                "queued": row.queued,
                "running": row.running,
                "oldest_queued_s": oldest,
                "solver_seconds": float(row.solver_seconds or 0.0),
            }
        )
    return found


async def workers(context: Context, connection: AsyncConnection) -> tuple[int, int]:
    """How many processes could solve, and how many do: alive by what the engine says, busy by the queue."""
    busy = int(
        await connection.scalar(select(func.count(distinct(solves.c.worker))).where(solves.c.state == "running")) or 0
    )
    alive = int(context.settings.embedded)
    if not context.database.is_sqlite:
        alive += int(await connection.scalar(_ALIVE, {"limit": context.settings.stale_after_s}) or 0)
    return max(alive, busy), busy


async def last_hour(context: Context, connection: AsyncConnection) -> dict[str, Any]:
    """Requests and how many of them the store answered, solves and failures, and the seconds of solving saved.

    An answer from the store saves the seconds that it took to find. Solves from before a trim of rows are not counted.
    """
    since = context.clock.now() - timedelta(hours=1)
    stored = requests.c.cache.in_(("hit", "near"))
    asked = select(
        func.count().label("requests"),
        func.count().filter(stored).label("hits"),
        func.sum(case((stored, requests.c.answer["seconds"].as_float()), else_=0.0)).label("saved_s"),
    ).where(requests.c.created_at > since)
    failed = solves.c.outcome["status"].as_string() == "failed"
    solved = select(func.count().label("solves"), func.count().filter(failed).label("failures")).where(
        solves.c.state == "ended", solves.c.ended_at > since
    )
    of_requests, of_solves = (await connection.execute(asked)).one(), (await connection.execute(solved)).one()
    return {
        "requests": of_requests.requests,
        "hits": of_requests.hits,
        "saved_s": float(of_requests.saved_s or 0.0),
        "solves": of_solves.solves,
        "failures": of_solves.failures,
    }


async def overview(context: Context) -> dict[str, Any]:
    """The operators' view: version, workers, the queue by tenant, the store."""
    async with context.database.read() as connection:
        by_tenant = await queue_by_tenant(context, connection)
        alive, busy = await workers(context, connection)
        stored = await store_bytes(connection)
        recent = await last_hour(context, connection)
    oldest = [each["oldest_queued_s"] for each in by_tenant if each["oldest_queued_s"] is not None]
    return {
        "version": solver_version(),
        "ready": await context.health.wrong() is None and not context.stopping,
        "workers_alive": alive,
        "workers_busy": busy,
        "queued": sum(each["queued"] for each in by_tenant),
        "running": sum(each["running"] for each in by_tenant),
        "oldest_queued_s": max(oldest, default=None),
        "store_bytes": stored,
        "last_hour": recent,
        "tenants": by_tenant,
    }


async def list_solves(
    connection: AsyncConnection, tenant: str | None, state: str | None, limit: int
) -> list[dict[str, Any]]:
    """The latest solves, newest first."""
    waiting = select(func.count()).where(requests.c.solve_id == solves.c.id, requests.c.ended.is_(False))
    query = select(solves, tenants.c.name.label("tenant"), waiting.scalar_subquery().label("requests")).join(
        tenants, tenants.c.id == solves.c.tenant_id
    )
    if tenant is not None:
        query = query.where(tenants.c.name == tenant)
    if state is not None:
        query = query.where(solves.c.state == state)
    rows = await connection.execute(query.order_by(solves.c.queued_at.desc(), solves.c.id.desc()).limit(limit))
    names = ("id", "tenant", "state", "method", "priority", "attempt", "worker", "requests", "spent_s")
    return [
        {name: getattr(row, name) for name in names} | {"queued_at": row.queued_at.isoformat()} for row in rows.all()
    ]
