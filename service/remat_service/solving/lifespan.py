"""Opening and closing a process's share of the service: one owner a SQLite file, schema, first tenant, leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog
from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from ..context import Room
from ..errors import ServiceError
from ..notify.postgres import Relay
from ..storage import migrations
from ..storage.database import Database
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


async def migrate(database: Database) -> None:
    """Bring the schema up to date."""
    async with database.write() as connection:
        await connection.run_sync(migrations.upgrade)


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


@contextmanager
def sole_owner(database: Database) -> Iterator[None]:
    """Hold the lock file beside a SQLite file; a crash releases it."""
    path = database.engine.url.database
    if not database.is_sqlite or not path or path == ":memory:":
        yield
        return
    handle = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(f"another service has {path} open; use PostgreSQL for more than one process") from None
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)
