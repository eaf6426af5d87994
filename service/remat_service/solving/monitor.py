"""While a solver child works: requests whose own limit is reached, the last one that leaves."""

from __future__ import annotations

import asyncio
import signal

import structlog

from remat_ir import Status, gap_of

from ..context import Context
from ..outage import Outage
from ..processes.supervisor import ChildRun
from ..requests.completion import end_request
from ..storage.queue import LostClaim
from .claim import Claim, limits_of_open_requests
from .record import SolveRecord

log = structlog.get_logger("remat_service.solving.monitor")

_TICK_S = 0.5
_PAUSE_S = 0.1  # between a change and the look: many that join at once cost one look
NEARLY_S = 0.05  # a solver that stops this short of its limit has used it


class Monitor:
    """Watches one round of a solve until it is cancelled."""

    def __init__(
        self, context: Context, claim: Claim, record: SolveRecord, run: ChildRun, limit_s: float, gap: float
    ) -> None:
        self._context, self._claim, self._record, self._run = context, claim, record, run
        self._limit_s, self._gap = limit_s, gap

    async def watch(self) -> None:
        """Look whenever something about the solve has changed, and now and then."""
        context, claim = self._context, self._claim
        outage = Outage(log, "looking at the open requests")
        with context.notifier.subscribe(claim.id) as changes:
            while True:
                await changes.wait(_TICK_S)
                await asyncio.sleep(_PAUSE_S)
                changes.reset()
                try:
                    await self._review()
                    outage.over()
                except LostClaim:
                    self._run.child.signal(signal.SIGKILL)
                    return
                except Exception as error:
                    outage.failed(error, solve=claim.id)

    async def _review(self) -> None:
        """End requests that want no more than there is by now; stop the child when nobody wants anything."""
        context, claim, record = self._context, self._claim, self._record
        async with context.database.read(brief=True) as connection:
            waiting = await limits_of_open_requests(connection, claim.id)
        spent, whole = record.spent(), record.spent_s + self._limit_s
        cost, bound = record.cost_ns, record.bound_ns
        gap = None if cost is None or bound is None else gap_of(cost, bound)
        due: list[tuple[str, str]] = []
        for request in waiting:
            if gap is not None and gap <= request.max_gap and request.max_gap > self._gap:
                due.append((request.id, "gap"))
            elif spent >= request.time_limit_s and request.time_limit_s < whole - NEARLY_S:
                due.append((request.id, "time"))
        if due:
            async with context.database.write(brief=True) as connection:
                await record.write(connection, {"spent_s": spent})
                for request_id, limit in due:
                    status = Status.NOTHING_FOUND if cost is None else Status.FEASIBLE
                    await end_request(context, connection, request_id, status, limit)
            context.notifier.notify(*(request_id for request_id, _ in due))
        if len(due) == len(waiting):
            await self._run.cancel()
