"""A process's share of the service: opened and closed, and the dispatcher of the solves that run in it.

To open it: one owner a SQLite file, schema, first tenant, leftovers. The dispatcher claims solves that wait and runs
them in this process's children.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

import structlog
from sqlalchemy.exc import SQLAlchemyError

from remat_solver import solver_version

from ..context import Context
from ..notify import PostgresRelay
from ..storage.database import Outage, migrate, sole_owner
from ..storage.seals import take_key
from ..tenants.keys import default_caller
from .run import execute

log = structlog.get_logger("remat_service.solving.dispatch")

_LOOK_S = 1.0
_PAUSE_S, _MOST_DOUBLINGS = 0.002, 6  # before the next look, after several in a row that found nothing


@asynccontextmanager
async def opened(context: Context) -> AsyncIterator[None]:
    """The database migrated and owned, the default tenant there, solves of a dead process queued again.

    Raises:
        ServiceError: another process has the SQLite file, or the store is sealed with another key.
    """
    with sole_owner(context.database):
        try:
            await migrate(context.database)
            async with context.database.write() as connection:
                await take_key(context.database, connection, context.seals)  # one process at a time from here on
                await default_caller(connection)
            if context.database.is_sqlite:
                await requeue_all(context)
            await context.health.wrong()  # notes which file it is
            async with _shared(context):
                yield
        finally:
            await context.supervisor.close()
            with contextlib.suppress(SQLAlchemyError):
                await context.write_behind.close()
            await context.database.close()


async def announce(context: Context) -> None:
    """Say what has been started, by which solver: to digest its source takes a second, in which a forkserver can start.

    No request is taken in before: the keys of what is stored have that digest.
    """
    settings, solver = context.settings, await asyncio.to_thread(solver_version)
    context.metrics.build.info({"solver": solver, "version": version("remat")})
    log.info(
        "started",
        version=solver,
        database=context.database.engine.url.render_as_string(hide_password=True),
        dispatcher=settings.dispatcher,
        keys="required" if settings.require_keys else "not required",
        workers=settings.workers,
    )


@asynccontextmanager
async def _shared(context: Context) -> AsyncIterator[None]:
    """What processes that share a database need: changes told to all of them and, in a cluster, a queue."""
    if context.database.is_sqlite:
        yield
        return
    if not context.settings.embedded:
        from .cluster import Fleet

        context.queue.carry = Fleet(context).carry
    async with PostgresRelay(context.database.engine.url, context.notifier).connected():
        yield


async def requeue_all(context: Context) -> None:
    """On SQLite this process is the only one, so whatever runs in the table ran in one that has died."""
    found = await context.queue.put_back()
    if found:
        log.warning("solves of a process that died are queued again", solves=found)


class Dispatcher:
    """Runs up to `settings.workers` solves at once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._running: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take solves."""
        self._loop = asyncio.create_task(self._dispatch())

    async def stop(self) -> None:
        """Stop taking solves, and give those that run back to the queue: what they found so far is stored."""
        tasks = [task for task in (self._loop, *self._running) if task is not None]
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
        outage, idle = Outage(log, "looking at the queue"), 0
        with context.notifier.subscribe("queue") as changes:
            while not context.stopping:
                changes.reset()
                with outage:
                    context.metrics.taken_over.inc(await context.queue.take_over())
                    idle = 0 if await self._take() else idle + 1
                if outage.failing:
                    await asyncio.sleep(_LOOK_S)
                if not await changes.wait(_LOOK_S):
                    idle = 0
                elif idle > 1:  # a burst of solves that may not run yet, as over a tenant's quota
                    await asyncio.sleep(_PAUSE_S * 2 ** min(idle, _MOST_DOUBLINGS))

    async def _take(self) -> bool:
        """Start what is due, up to the number of workers; False where one is free and there was nothing to start."""
        context, started = self._context, False
        while len(self._running) < context.settings.workers:
            claimed = await context.queue.claim(context.name)
            if claimed is None:
                return started
            task = asyncio.create_task(execute(context, claimed))
            self._running.add(task)
            task.add_done_callback(self._ended)
            started = True
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._context.notifier.notify("queue")
