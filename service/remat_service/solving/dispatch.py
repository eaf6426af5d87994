"""The in-process dispatcher: takes queued solves from the table, the most urgent first, tenants in turn."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import structlog
from sqlalchemy import Select, and_, bindparam, case, func, or_, select

from ..context import Context
from ..storage.tables import solves, tenants
from .execute import execute_solve

log = structlog.get_logger("remat_service.solving.dispatch")

_LOOK_S = 1.0


def _due() -> Select[tuple[str]]:
    """By priority; among equals the tenant with the fewest running solves for its weight; then the oldest."""
    taken_over = and_(solves.c.state == "running", solves.c.id.in_(bindparam("silent", expanding=True)))
    busy = (
        select(solves.c.tenant_id, func.count().label("running"))
        .where(solves.c.state == "running")
        .group_by(solves.c.tenant_id)
        .subquery()
    )
    share = func.coalesce(busy.c.running, 0) / tenants.c.weight
    full = and_(
        tenants.c.most_running.is_not(None), func.coalesce(busy.c.running, 0) >= tenants.c.most_running, ~taken_over
    )
    return (
        select(solves.c.id)
        .join(tenants, tenants.c.id == solves.c.tenant_id)
        .outerjoin(busy, busy.c.tenant_id == solves.c.tenant_id)
        .where(or_(solves.c.state == "queued", taken_over), ~full)
        .where(solves.c.id.not_in(bindparam("skip", expanding=True)))
        .order_by(case((taken_over, 0), else_=1), solves.c.priority.desc(), share, solves.c.queued_at, solves.c.id)
        .limit(1)
    )


_DUE = _due()


async def next_solve(context: Context, skip: frozenset[str] = frozenset()) -> str | None:
    """The queued solve that is due next, or a running one whose worker has fallen silent.

    Never the latter in a cluster: there the engine says which worker is dead, and the solve is queued again.
    """
    async with context.database.read() as connection:
        given = {"silent": await context.leases.silent(connection), "skip": sorted(skip)}
        found: str | None = await connection.scalar(_DUE, given)
    return found


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
        with context.notifier.subscribe("queue") as changes:
            while not context.stopping:
                changes.reset()
                try:
                    await self._take()
                except Exception:
                    log.exception("a look at the queue failed; trying again")
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
            log.error("a solve could not be claimed; trying again", solve=solve_id, error=str(error))
            return
        self._context.notifier.notify("queue")
