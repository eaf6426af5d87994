"""While a solver child works: signs of life, requests whose own limit is reached, the last one that leaves."""

from __future__ import annotations

import asyncio
import signal
import time

import structlog

from remat_ir import Status, gap_of

from ..context import Room
from ..notify.notifier import heard
from ..processes.supervisor import Run
from ..requests.completion import end_request
from ..storage.tables import now
from .claim import Claim, LostClaim, limits_of_open_requests
from .record import Ledger

log = structlog.get_logger("remat_service.solving.monitor")

_TICK_S = 0.5
_PAUSE_S = 0.1  # between a ring and the look: a crowd that joins is looked at once
NEARLY_S = 0.05  # a solver that stops this short of its limit has used it


class Lookout:
    """Keeps one round of a solve under its eyes until it is cancelled."""

    def __init__(self, room: Room, claim: Claim, ledger: Ledger, run: Run, limit_s: float, gap: float) -> None:
        self._room, self._claim, self._ledger, self._run = room, claim, ledger, run
        self._limit_s, self._gap = limit_s, gap

    async def watch(self) -> None:
        """Look whenever something about the solve has changed, and now and then."""
        room, claim, ledger = self._room, self._claim, self._ledger
        beat, bell = time.monotonic(), room.bells.listen(claim.id)
        while True:
            await heard(bell, _TICK_S)
            await asyncio.sleep(_PAUSE_S)
            bell = room.bells.listen(claim.id)
            try:
                if time.monotonic() - beat >= room.settings.heartbeat_s:
                    beat = time.monotonic()
                    async with room.database.write() as connection:
                        await ledger.write(connection, {"heartbeat_at": now(), "spent_s": ledger.spent()})
                await self._review()
            except LostClaim:
                ledger.lost = True
                self._run.child.signal(signal.SIGKILL)
                return
            except Exception:
                log.exception("a look at the open requests failed; trying again", solve=claim.id)

    async def _review(self) -> None:
        """End requests that want no more than there is by now; stop the child when nobody wants anything."""
        room, claim, ledger = self._room, self._claim, self._ledger
        async with room.database.read() as connection:
            waiting = await limits_of_open_requests(connection, claim.id)
        spent, whole = ledger.spent(), ledger.spent_s + self._limit_s
        cost, bound = ledger.cost_ns, ledger.bound_ns
        gap = None if cost is None or bound is None else gap_of(cost, bound)
        due: list[tuple[str, str]] = []
        for request in waiting:
            if gap is not None and gap <= request.max_gap and request.max_gap > self._gap:
                due.append((request.id, "gap"))
            elif spent >= request.time_limit_s and request.time_limit_s < whole - NEARLY_S:
                due.append((request.id, "time"))
        if due:
            async with room.database.write() as connection:
                await ledger.write(connection, {"spent_s": spent})
                for request_id, limit in due:
                    status = Status.NOTHING_FOUND if cost is None else Status.FEASIBLE
                    await end_request(room, connection, request_id, status, limit)
            room.bells.ring(*(request_id for request_id, _ in due))
        if len(due) == len(waiting):
            await self._run.cancel()
