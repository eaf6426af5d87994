"""One look for all who wait: which watched requests have changed, where a note from another process was lost."""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy import select

from ..context import Context
from ..outage import Outage
from ..storage.tables import requests, solves

log = structlog.get_logger("remat_service.requests.poller")

_POLL_S = 5.0
_IDS_A_QUERY = 500

State = tuple[object, ...]
"""What a listener would see: whether the request has ended, and its solve's state, cost and bound."""


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
