"""Housekeeping: what is evicted and when; what is pinned stays."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Status

from ..context import Room
from ..storage.database import alone
from ..storage.tables import graphs, groups, now, plans, requests, solves
from .completion import end_request, leave

log = structlog.get_logger("remat_service.requests.housekeeping")

_BATCH = 100
_LOCK = 0x6B656570  # one process at a time sums the store up


async def housekeeping(room: Room) -> None:
    """Evict by age and bytes, and end requests that have waited too long, for ever."""
    evicted = -float("inf")
    while not room.stopping:
        try:
            await expire_queued(room)
            if time.monotonic() - evicted >= room.settings.housekeeping_s:
                await evict(room)
                evicted = time.monotonic()
        except Exception:
            log.exception("housekeeping failed; trying again")
        await asyncio.sleep(min(room.settings.housekeeping_s, 5.0))


async def expire_queued(room: Room) -> int:
    """End requests whose queue limit has passed before their solve was started."""
    moment = now()
    async with room.database.read() as connection:
        rows = (
            await connection.execute(
                select(requests.c.id, requests.c.created_at, requests.c.queue_limit_s, requests.c.solve_id)
                .join(solves, solves.c.id == requests.c.solve_id)
                .where(requests.c.ended.is_(False), requests.c.queue_limit_s.is_not(None), solves.c.state == "queued")
            )
        ).all()
    late = [row for row in rows if row.created_at + timedelta(seconds=row.queue_limit_s) < moment]
    for row in late:
        await expire(room, row.id, row.solve_id)
    return len(late)


async def expire(room: Room, request_id: str, solve_id: str) -> None:
    """End one request that was not started in time; its solve leaves the queue with its last request."""
    async with room.database.write() as connection:
        await connection.execute(select(solves.c.id).where(solves.c.id == solve_id).with_for_update())
        said = "The queue limit has passed before a solver was free."
        await end_request(room, connection, request_id, Status.NOTHING_FOUND, "time", said)
        await leave(connection, solve_id)
    room.bells.ring(request_id, solve_id)


async def evict(room: Room) -> int:
    """Forget what is old, then the least used until the store is within its bytes; returns the graphs forgotten."""
    settings = room.settings
    cutoff = now() - timedelta(days=settings.store_days)
    async with room.database.write() as connection:
        if not await alone(connection, _LOCK):
            return 0
        done = await connection.execute(
            delete(requests).where(requests.c.ended.is_(True), requests.c.ended_at < cutoff)
        )
        room.metrics.evicted.labels("request").inc(done.rowcount)
        await connection.execute(
            delete(solves).where(solves.c.state == "ended", ~exists().where(requests.c.solve_id == solves.c.id))
        )
        await connection.execute(delete(groups).where(groups.c.created_at < cutoff))
        old = await connection.execute(delete(plans).where(plans.c.pinned.is_(False), plans.c.used_at < cutoff))
        room.metrics.evicted.labels("plan").inc(old.rowcount)
        gone = await _drop(connection, _free().where(graphs.c.used_at < cutoff))
        while await store_bytes(connection) > settings.store_bytes:
            dropped = await _drop(connection, _free().order_by(graphs.c.used_at).limit(_BATCH))
            gone += dropped
            if not dropped:
                break
    room.metrics.evicted.labels("graph").inc(gone)
    return gone


def _free() -> Any:
    """Graphs with no pinned plan and no solve under way."""
    pinned = exists().where(plans.c.graph_key == graphs.c.key, plans.c.pinned.is_(True))
    busy = exists().where(solves.c.graph_key == graphs.c.key, solves.c.state.in_(("queued", "running")))
    return select(graphs.c.key).where(~pinned, ~busy)


async def _drop(connection: AsyncConnection, query: Any) -> int:
    keys = list((await connection.execute(query)).scalars())
    for start in range(0, len(keys), _BATCH):
        await connection.execute(delete(graphs).where(graphs.c.key.in_(keys[start : start + _BATCH])))
    return len(keys)


async def store_bytes(connection: AsyncConnection) -> int:
    """Bytes of graphs and plans in the store."""
    total = 0
    for table in (graphs, plans):
        total += int(await connection.scalar(select(func.coalesce(func.sum(table.c.size_bytes), 0))) or 0)
    return total


async def pin(room: Room, plan_id: str, pinned: bool) -> None:
    """Keep a plan from eviction, or let it go again."""
    async with room.database.write() as connection:
        await connection.execute(update(plans).where(plans.c.id == plan_id).values(pinned=pinned))
