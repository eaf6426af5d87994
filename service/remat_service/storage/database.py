"""The database: one engine, readers and writers, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Table, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from ..clock import SYSTEM, Clock
from ..errors import ServiceError
from ..settings import driver_url

Connect = Callable[..., Awaitable[Any]]
"""Opens a connection of the driver."""


class Database:
    """Writers come one at a time on SQLite, which has one write lock anyway.

    SQLite: WAL, `synchronous=NORMAL`, `busy_timeout`, `foreign_keys=ON`; the driver begins nothing by itself, writers
    `BEGIN IMMEDIATE`, so that no transaction finds out at its end that it may not write.

    Args:
        clock: the time of this process, for all that is written and waited for.
        connect: opens a connection in the driver's place.
    """

    def __init__(self, url: str, clock: Clock = SYSTEM, connect: Connect | None = None) -> None:
        found = driver_url(url)
        self.url, self.clock, self.is_sqlite = str(found), clock, isinstance(found, URL)
        # a burst waits for a connection rather than failing
        more: dict[str, Any] = {"pool_size": 10, "max_overflow": 0, "pool_timeout": 60.0}
        more["json_deserializer"] = json_or_nothing
        if not self.is_sqlite:
            more |= {"pool_pre_ping": True}
        elif isinstance(found, URL) and found.database not in (None, ":memory:"):
            _make_private(Path(str(found.database)))
        else:
            more = {"json_deserializer": json_or_nothing}
        if connect is not None:
            more["async_creator"] = connect
        self.engine: AsyncEngine = create_async_engine(found, **more)
        self._reader = self.engine
        if not self.is_sqlite:  # READ COMMITTED has no snapshot to lose, and BEGIN and ROLLBACK are a trip each
            self._reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._writing = asyncio.Lock()
        if self.is_sqlite:
            event.listen(self.engine.sync_engine, "connect", _on_connect)
            event.listen(self.engine.sync_engine, "begin", _on_begin)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection to read from: in a transaction, and so a snapshot, on SQLite; statement by statement else."""
        async with self._reader.connect() as connection, connection.begin():
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A connection in a write transaction, committed at the end and rolled back on an error."""
        if not self.is_sqlite:
            async with self.engine.begin() as connection:
                yield connection
            return
        async with self._writing, self.engine.connect() as connection:
            await connection.execution_options(remat_writer=True)
            async with connection.begin():
                yield connection

    @asynccontextmanager
    async def change_schema(self) -> AsyncIterator[AsyncConnection]:
        """A write transaction for migrations, in which SQLite does not enforce foreign keys.

        SQLite changes most of a table by a copy of it, and dropping the old one would take along, or be refused for,
        the rows that refer to it. The setting can't be changed within a transaction.
        """
        if not self.is_sqlite:
            async with self.write() as connection:
                yield connection
            return
        async with self._writing, self.engine.connect() as connection:
            await connection.execution_options(remat_writer=True, remat_foreign_keys=False)
            try:
                async with connection.begin():
                    yield connection
            finally:
                await connection.run_sync(_enforce_foreign_keys)

    def insert(self, table: Table) -> Any:
        """An INSERT of this dialect, which knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()


async def try_lock(connection: AsyncConnection, key: int) -> bool:
    """Whether no other process is at the same work, up to the end of this transaction; on SQLite there is none."""
    if connection.dialect.name != "postgresql":
        return True
    return bool(await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": key}))


def json_or_nothing(text: str) -> Any:
    """A JSON column's value; None where it was damaged, which its reader has to expect."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _make_private(path: Path) -> None:
    """Make the file, where there is none, for its owner alone; SQLite gives what it writes next to it the same mode.

    Raises:
        ServiceError: it can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # never one that is there: closing it would end the locks that SQLite has on it in this process
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise ServiceError(f"can't make the database {path}: {error.strerror}; see REMAT_DATABASE_URL") from None


def read_only(path: str) -> str:
    """The URI by which SQLite opens a file to read from it alone, whatever its name is."""
    return Path(path).absolute().as_uri() + "?mode=ro"


def _on_connect(connection: Any, record: object) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _enforce_foreign_keys(connection: Connection) -> None:
    cursor = connection.connection.cursor()  # past SQLAlchemy, which would begin a transaction
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("remat_foreign_keys", True):
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("remat_writer") else "BEGIN")
