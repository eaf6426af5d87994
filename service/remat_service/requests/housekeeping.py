"""Housekeeping: what is evicted, and requests that have waited too long."""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy import select

from remat_ir import Status

from ..context import Context
from ..outage import Outage
from ..storage.eviction import evict
from ..storage.tables import requests, solves
from ..tenants.quotas import trim_requests
from .completion import end_if_unwanted, end_request

log = structlog.get_logger("remat_service.requests.housekeeping")

_BATCH = 100
_LOCK = 0x6B656570  # one process at a time sums the store up


async def housekeeping(context: Context) -> None:
    """Evict by age and bytes, and end requests that have waited too long, for ever."""
    evicted, outage = -float("inf"), Outage(log, "housekeeping")
    while not context.stopping:
        try:
            await expire_queued(context)
            if context.clock.monotonic() - evicted >= context.settings.housekeeping_s:
                await evict(context.database, context.settings, context.metrics)
                async with context.database.write() as connection:
                    context.metrics.evicted.labels("request").inc(await trim_requests(connection))
                evicted = context.clock.monotonic()
            outage.over()
        except Exception as error:
            outage.failed(error)
        await asyncio.sleep(min(context.settings.housekeeping_s, 5.0))


async def expire_queued(context: Context) -> int:
    """End requests whose queue limit has passed before their solve was started."""
    asked = context.waits.moment()
    async with context.database.read() as connection:
        rows = (
            await connection.execute(
                select(requests.c.id, requests.c.queue_limit_s, requests.c.solve_id, solves.c.state)
                .join(solves, solves.c.id == requests.c.solve_id)
                .where(requests.c.ended.is_(False), requests.c.queue_limit_s.is_not(None))
            )
        ).all()
    context.waits.forget_others((row.id for row in rows), asked)
    for row in rows:
        context.waits.begin(row.id)  # another process may have taken it in
    late = [row for row in rows if row.state == "queued" and context.waits.seconds(row.id, asked) > row.queue_limit_s]
    for row in late:
        await expire(context, row.id, row.solve_id)
    return len(late)


async def expire(context: Context, request_id: str, solve_id: str) -> None:
    """End one request that was not started in time; its solve leaves the queue with its last request."""
    async with context.database.write() as connection:
        query = select(solves.c.state).where(solves.c.id == solve_id).with_for_update()
        if await connection.scalar(query) != "queued":  # it was started after all
            return
        said = "The queue limit has passed before a solver was free."
        await end_request(context, connection, request_id, Status.NOTHING_FOUND, "time", said)
        await end_if_unwanted(context, connection, solve_id)
    context.notifier.notify(request_id, solve_id)
