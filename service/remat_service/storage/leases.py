"""Which running solves have fallen silent, by this process's own clock: machines need not agree on the time."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, and_, false, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..clock import Clock
from .tables import solves

_Sign = tuple[int, datetime]  # the attempt, and its last heartbeat: a mark that changes, never compared with a clock


class Leases:
    """The signs of life of running solves, and since when each has been the same.

    Args:
        clock: counts the seconds of this process.
        stale_after_s: seconds without a new sign after which a solve may be taken over; None for never.
    """

    def __init__(self, clock: Clock, stale_after_s: float | None) -> None:
        self._clock, self._stale_after_s = clock, stale_after_s
        self._seen: dict[str, tuple[_Sign, float]] = {}

    async def silent(self, connection: AsyncConnection) -> list[str]:
        """The ids of running solves that have shown no new sign of life for so long."""
        if self._stale_after_s is None:
            return []
        asked = self._clock.monotonic()
        query = select(solves.c.id, solves.c.attempt, solves.c.heartbeat_at).where(solves.c.state == "running")
        rows = (await connection.execute(query)).all()
        told, before = self._clock.monotonic(), self._seen
        signs: dict[str, _Sign] = {row.id: (row.attempt, row.heartbeat_at) for row in rows}
        self._seen = {
            found: before[found] if found in before and before[found][0] == sign else (sign, told)
            for found, sign in signs.items()
        }
        return sorted(found for found, (_, since) in self._seen.items() if asked - since > self._stale_after_s)

    def lapsed(self, solve_id: str) -> ColumnElement[bool]:
        """Whether a solve still shows only the sign that was seen last, which `silent` has found too old."""
        sign, since = self._seen.get(solve_id, (None, 0.0))
        if sign is None or self._stale_after_s is None or self._clock.monotonic() - since <= self._stale_after_s:
            return false()
        attempt, heartbeat = sign
        return and_(solves.c.state == "running", solves.c.attempt == attempt, solves.c.heartbeat_at == heartbeat)
