"""The in-process dispatcher: takes queued solves from the table, tenants in turn, of each the most urgent first."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import structlog
from sqlalchemy import Select, and_, bindparam, case, func, or_, select

from ..context import Context
from ..outage import Outage, first_line
from ..storage.tables import solves, tenants
from ..turns import Waiting
from .execute import execute_solve

log = structlog.get_logger("remat_service.solving.dispatch")

_LOOK_S = 1.0


def _due() -> Select[Any]:
    """Of each tenant that may have one more running, its next solve: by its own priorities, then the oldest."""
    taken_over = and_(solves.c.state == "running", solves.c.id.in_(bindparam("silent", expanding=True)))
    busy = (
        select(solves.c.tenant_id, func.count().label("running"))
        .where(solves.c.state == "running")
        .group_by(solves.c.tenant_id)
        .subquery()
    )
    running = func.coalesce(busy.c.running, 0)
    full = and_(tenants.c.most_running.is_not(None), running >= tenants.c.most_running, ~taken_over)
    first = case((taken_over, 0), else_=1)
    own_order = (first, solves.c.priority.desc(), solves.c.queued_at, solves.c.id)
    ranked = (
        select(
            solves.c.id,
            solves.c.tenant_id,
            tenants.c.weight,
            first.label("first"),
            running.label("running"),
            solves.c.queued_at,
            func.row_number().over(partition_by=solves.c.tenant_id, order_by=own_order).label("place"),
        )
        .join(tenants, tenants.c.id == solves.c.tenant_id)
        .outerjoin(busy, busy.c.tenant_id == solves.c.tenant_id)
        .where(or_(solves.c.state == "queued", taken_over), ~full)
        .where(solves.c.id.not_in(bindparam("skip", expanding=True)))
        .subquery()
    )
    return select(*(ranked.c[name] for name in ("id", "tenant_id", "weight", "first", "running", "queued_at"))).where(
        ranked.c.place == 1
    )


_DUE = _due()


async def next_solve(context: Context, skip: frozenset[str] = frozenset()) -> str | None:
    """The queued solve that is due next, or a running one whose worker has fallen silent.

    A priority orders the solves of one tenant. Between tenants it counts for nothing: there weights and what each was
    given decide. In a cluster no running one is due: there the engine says which worker is dead, and queues it again.
    """
    async with context.database.read() as connection:
        given = {"silent": await context.leases.silent(connection), "skip": sorted(skip)}
        rows = (await connection.execute(_DUE, given)).all()
    waiting = (
        Waiting(row.id, row.tenant_id, row.weight, row.first == 0, row.running, row.queued_at.timestamp())
        for row in rows
    )
    due = context.turns.next(waiting)
    return None if due is None else due.solve_id


class Dispatcher:
    """Runs up to `settings.workers` solves at once in this process's children."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take solves."""
        self._loop = asyncio.create_task(self._dispatch())

    async def stop(self) -> None:
        """Stop taking solves, and give those that run back to the queue: what they found so far is stored."""
        tasks = [task for task in (self._loop, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    async def _dispatch(self) -> None:
        context = self._context
        try:
            await context.supervisor.warm()
        except (OSError, TimeoutError):
            log.exception("no solver child can be started; trying again with the first solve")
        outage = Outage(log, "looking at the queue")
        with context.notifier.subscribe("queue") as changes:
            while not context.stopping:
                changes.reset()
                try:
                    await self._take()
                    outage.over()
                except Exception as error:
                    outage.failed(error)
                    await asyncio.sleep(_LOOK_S)
                await changes.wait(_LOOK_S)

    async def _take(self) -> None:
        """Start what is due, up to the number of workers."""
        context = self._context
        while len(self._running) < context.settings.workers:
            solve_id = await next_solve(context, frozenset(self._running))
            if solve_id is None:
                return
            self._running[solve_id] = task = asyncio.create_task(execute_solve(context, solve_id))
            task.add_done_callback(partial(self._ended, solve_id))
            await asyncio.sleep(0)

    def _ended(self, solve_id: str, task: asyncio.Task[bool]) -> None:
        self._running.pop(solve_id, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # the database is in trouble: the next look is soon enough
            log.error("a solve could not be claimed; trying again", solve=solve_id, error=first_line(error))
            return
        self._context.notifier.notify("queue")
