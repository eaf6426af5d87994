"""Opening and closing a process's share of the service: one owner a SQLite file, schema, first tenant, leftovers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from ..context import Room
from ..notify.postgres import Relay
from ..storage import migrations
from ..storage.prepare import migrate, sole_owner
from ..storage.tables import solves
from ..tenants.keys import default_caller

log = structlog.get_logger("remat_service.solving.lifespan")


@asynccontextmanager
async def opened(room: Room) -> AsyncIterator[None]:
    """The database migrated and owned, the default tenant there, solves of a dead process queued again.

    Raises:
        ServiceError: another process has the SQLite file.
    """
    with sole_owner(room.database):
        try:
            await migrate(room.database)
            async with room.database.write() as connection:
                await connection.run_sync(migrations.lock)
                await default_caller(connection)
            if room.database.is_sqlite:
                await _requeue_all(room)
            async with _shared(room):
                yield
        finally:
            await room.warden.close()
            with contextlib.suppress(SQLAlchemyError):
                await room.behind.close()
            room.glance.close()
            await room.database.close()


@asynccontextmanager
async def _shared(room: Room) -> AsyncIterator[None]:
    """What processes that share a database need: bells that ring in all, and, in a cluster, a queue to tell."""
    if room.database.is_sqlite:
        yield
        return
    relay = Relay(room.database.url, room.bells)
    relay.start()
    keeper: asyncio.Task[None] | None = None
    if not room.settings.embedded:
        from . import cluster

        room.enqueue = cluster.enqueue
        keeper = asyncio.create_task(cluster.reconcile_for_ever(room))
    try:
        yield
    finally:
        if keeper is not None:
            keeper.cancel()
        await relay.stop()


async def _requeue_all(room: Room) -> None:
    """On SQLite this process is the only one, so whatever runs in the table ran in one that has died."""
    async with room.database.write() as connection:
        done = await connection.execute(
            update(solves)
            .where(solves.c.state == "running")
            .values(state="queued", worker=None, revision=solves.c.revision + 1)
        )
    if done.rowcount:
        log.warning("solves of a process that died are queued again", solves=done.rowcount)
