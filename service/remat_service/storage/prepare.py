"""Before a database is used: one owner a SQLite file, and the schema brought up to date."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from ..errors import ServiceError
from . import migrations
from .database import Database


async def migrate(database: Database) -> None:
    """Bring the schema up to date.

    Raises:
        ServiceError: the database can't be opened, or written to.
    """
    try:
        async with database.change_schema() as connection:
            await connection.run_sync(migrations.upgrade)
    except DBAPIError as error:
        where = database.engine.url.render_as_string(hide_password=True)
        why = str(error.orig).strip().splitlines()[0]
        raise ServiceError(f"can't use the database {where}: {why}; see REMAT_DATABASE_URL") from None


@contextmanager
def sole_owner(database: Database) -> Iterator[None]:
    """Hold a lock on a SQLite file itself, under whatever name it is opened; a crash releases it.

    It is `flock`'s, of which SQLite's own locks know nothing on Linux. The handle is open for as long as the
    database is, since closing one ends SQLite's locks.
    """
    path = database.engine.url.database
    if not database.is_sqlite or not path or path == ":memory:":
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(f"another service has {path} open; use PostgreSQL for more than one process") from None
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)
