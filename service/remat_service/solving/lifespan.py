"""Opening and closing a process's share of the service: one owner a SQLite file, schema, first tenant, leftovers."""

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
from ..storage import migrations
from ..storage.database import migrate, sole_owner
from ..storage.seals import take_key
from ..tenants.keys import default_caller

log = structlog.get_logger("remat_service.solving.lifespan")


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
                await connection.run_sync(migrations.lock)
                await take_key(context.database, connection, context.seals)
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
    relay = PostgresRelay(context.database.url, context.notifier)
    relay.start()
    if not context.settings.embedded:
        from .cluster import Fleet

        context.queue.carry = Fleet(context).carry
    try:
        yield
    finally:
        await relay.stop()


async def requeue_all(context: Context) -> None:
    """On SQLite this process is the only one, so whatever runs in the table ran in one that has died."""
    found = await context.queue.put_back()
    if found:
        log.warning("solves of a process that died are queued again", solves=found)
