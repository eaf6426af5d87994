"""What an operator sees, ends and changes: solves of all tenants, what waits, who works, tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from sqlalchemy import BigInteger, Integer, case, distinct, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_solver import solver_version

from ..context import Context
from ..errors import Invalid
from ..storage.eviction import store_bytes
from ..storage.tables import graphs, requests, solves, tenants
from ..tenants.keys import DEFAULT_TENANT, record, tenant_row
from .attachments import drop_names
from .completion import cancel_solve

_ALIVE = text("SELECT count(*) FROM procrastinate_workers WHERE last_heartbeat > now() - make_interval(secs => :limit)")


@dataclass(frozen=True)
class TenantUse:
    """What a tenant has in the queue, and the seconds of solving that it has had of what is stored."""

    tenant: str
    queued: int
    running: int
    oldest_queued_s: float | None
    solver_seconds: float


@dataclass(frozen=True)
class LastHour:
    """Requests and solves of the last hour.

    `saved_s`: of solving, by answers from the store; `saved_bytes`: of memory, by all answers, against plain training.
    """

    requests: int
    hits: int
    saved_s: float
    saved_bytes: int
    solves: int
    failures: int


@dataclass(frozen=True)
class Overview:
    """The operators' view."""

    version: str
    ready: bool
    workers_alive: int
    workers_busy: int
    queued: int
    running: int
    oldest_queued_s: float | None
    store_bytes: int
    last_hour: LastHour
    tenants: list[TenantUse]


@dataclass(frozen=True)
class SolveOfAll:
    """A solve as an operator sees it; `requests` wait for it."""

    id: str
    tenant: str
    state: str
    method: str
    priority: int
    attempt: int
    worker: str | None
    requests: int
    spent_s: float
    queued_at: str


async def queue_by_tenant(context: Context, connection: AsyncConnection) -> list[TenantUse]:
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
        found.append(TenantUse(row.name, row.queued, row.running, oldest, float(row.solver_seconds or 0.0)))
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


async def last_hour(context: Context, connection: AsyncConnection) -> LastHour:
    """Requests and how many of them the store answered, solves and failures, and what the answers have saved.

    An answer from the store saves the seconds that it took to find. Solves from before a trim of rows are not counted.
    """
    since = context.clock.now() - timedelta(hours=1)
    stored = requests.c.cache.in_(("hit", "near"))
    peak = requests.c.answer["peak_bytes"].as_float()
    saved = graphs.c.plain_peak_bytes + requests.c.fixed_bytes - peak
    asked = (
        select(
            func.count().label("requests"),
            func.count().filter(stored).label("hits"),
            func.sum(case((stored, requests.c.answer["seconds"].as_float()), else_=0.0)).label("saved_s"),
            func.sum(case((requests.c.ended & (saved > 0), saved), else_=0.0)).label("saved_bytes"),
        )
        .outerjoin_from(requests, graphs, graphs.c.key == requests.c.graph_key)
        .where(requests.c.created_at > since)
    )
    failed = solves.c.outcome["status"].as_string() == "failed"
    solved = select(func.count().label("solves"), func.count().filter(failed).label("failures")).where(
        solves.c.state == "ended", solves.c.ended_at > since
    )
    of_requests = (await connection.execute(asked)).one()
    of_solves = (await connection.execute(solved)).one()
    return LastHour(
        of_requests.requests,
        of_requests.hits,
        float(of_requests.saved_s or 0.0),
        int(of_requests.saved_bytes or 0),
        of_solves.solves,
        of_solves.failures,
    )


async def overview(context: Context) -> Overview:
    """The operators' view: version, workers, the queue by tenant, the store."""
    async with context.database.read() as connection:
        by_tenant = await queue_by_tenant(context, connection)
        alive, busy = await workers(context, connection)
        stored = await store_bytes(connection)
        recent = await last_hour(context, connection)
    return Overview(
        solver_version(),
        await context.health.wrong() is None and not context.stopping,
        alive,
        busy,
        sum(each.queued for each in by_tenant),
        sum(each.running for each in by_tenant),
        max((each.oldest_queued_s for each in by_tenant if each.oldest_queued_s is not None), default=None),
        stored,
        recent,
        by_tenant,
    )


async def end_solves(context: Context, actor: str, solve_ids: Sequence[str]) -> int:
    """End every request that waits for these solves; how many.

    Raises:
        NotFound: there is no such solve.
    """
    ended = 0
    for solve_id in solve_ids:
        ended += await cancel_solve(context, solve_id)
    async with context.database.write() as connection:
        await record(connection, actor, "solves cancel", {"solves": list(solve_ids), "requests": ended})
    return ended


async def change_tenant(connection: AsyncConnection, actor: str, name: str, changes: Mapping[str, Any]) -> Any:
    """Change columns of a tenant; its row. Of one that is disabled, the caller ends what is under way.

    Raises:
        NotFound: there is no such tenant.
        Invalid: it is the default tenant, and is to be disabled; or a limit is more than a database holds.
    """
    if name == DEFAULT_TENANT and changes.get("disabled"):
        raise Invalid("the default tenant has no keys to refuse; set REMAT_REQUIRE_KEYS", "/disabled")
    for column, value in changes.items():
        most = 2**63 - 1 if isinstance(tenants.c[column].type, BigInteger) else 2**31 - 1
        if isinstance(tenants.c[column].type, Integer) and value is not None and value > most:
            raise Invalid(f"{column} is {value}, more than the {most} that can be stored", f"/{column}")
    if changes:
        await connection.execute(update(tenants).where(tenants.c.name == name).values(changes))
    row = await tenant_row(connection, name)
    if changes.get("store_names") is False:
        await drop_names(connection, row.id)
    await record(connection, actor, "tenants change", {"name": name, **changes})
    return row


async def list_solves(
    connection: AsyncConnection, tenant: str | None, state: str | None, limit: int
) -> list[SolveOfAll]:
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
    found = [{**row._mapping, "queued_at": row.queued_at.isoformat()} for row in rows]
    return [SolveOfAll(**{each.name: row[each.name] for each in fields(SolveOfAll)}) for row in found]
