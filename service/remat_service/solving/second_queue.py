"""Whether workers take the solves that this server starts in its own children: a setting that was forgotten."""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy import text

from ..context import Context
from ..outage import Outage

log = structlog.get_logger("remat_service.solving.second_queue")

_LOOK_S = 5.0
_ALIVE = text(
    "SELECT count(*) FROM procrastinate_workers WHERE last_heartbeat > now() - make_interval(secs => :stale_after_s)"
)


async def look(context: Context, before: int = 0) -> int:
    """How many workers are alive at the database of a server that solves by itself.

    Args:
        before: how many there were at the last look; the first one is an error in the log.
    """
    async with context.database.read() as connection:
        found = await connection.scalar(_ALIVE, {"stale_after_s": context.settings.stale_after_s})
    workers = int(found or 0)
    if workers and not before:
        log.error(
            "workers run on this database, and this server solves by itself: solves are started twice; "
            "set REMAT_DISPATCHER=cluster for all servers, or stop the workers",
            workers=workers,
        )
    context.metrics.second_queue.set(workers)
    return workers


async def keep_looking(context: Context) -> None:
    """Look at the start and every few seconds, for ever."""
    outage, workers = Outage(log, "looking for workers"), 0
    while not context.stopping:
        try:
            workers = await look(context, workers)
            outage.over()
        except Exception as error:
            outage.failed(error)
        await asyncio.sleep(_LOOK_S)
