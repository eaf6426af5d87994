"""What goes on for ever next to the requests: eviction, requests that have waited too long, notes that were lost."""

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
from .completion import end_ahead

log = structlog.get_logger("remat_service.requests.housekeeping")

_POLL_S = 5.0
_IDS_A_QUERY = 500
State = tuple[object, ...]
"""What a listener would see: whether the request has ended, and its solve's state, cost and bound."""


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
    said = "The queue limit has passed before a solver was free."
    await end_ahead(context, request_id, solve_id, Status.NOTHING_FOUND, "time", said, unless_started=True)


async def poll(context: Context) -> None:
    """Wake the waits and streams of this process whose requests have changed, every few seconds, for ever.

    Waits don't look by themselves, so that their number costs the database nothing.
    """
    seen: dict[str, State] = {}
    outage = Outage(log, "looking for lost notes")
    while not context.stopping:
        try:
            seen = await look(context, seen)
            outage.over()
        except Exception as error:
            outage.failed(error)
        await asyncio.sleep(_POLL_S)


async def look(context: Context, seen: dict[str, State]) -> dict[str, State]:
    """Compare the watched requests with what was seen before, wake who waits for one that differs; what is seen now.

    A request seen for the first time counts as changed: it may have, between its listener's look and this one.
    """
    watched = sorted(context.notifier.keys())
    found: dict[str, State] = {}
    for start in range(0, len(watched), _IDS_A_QUERY):
        async with context.database.read(brief=True) as connection:
            rows = await connection.execute(
                select(requests.c.id, requests.c.ended, solves.c.state, solves.c.cost_ns, solves.c.bound_ns)
                .outerjoin(solves, solves.c.id == requests.c.solve_id)
                .where(requests.c.id.in_(watched[start : start + _IDS_A_QUERY]))
            )
            found |= {row.id: tuple(row[1:]) for row in rows}
    context.notifier.notify_here(*(key for key, state in found.items() if seen.get(key) != state))
    return found
