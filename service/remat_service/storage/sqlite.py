"""SQLite for SQLAlchemy's asyncio, on the thread of the event loop where a statement is brief.

A statement that an index answers takes SQLite some tens of microseconds, and a trip to another thread and back several
times that; a driver with a thread of its own makes three trips a statement. So what is marked as brief
(`Database.read(brief=True)`) runs where it is asked for. All else goes to a thread: statements that look at a table,
the wait for the write lock, and each commit, which at times moves the log into the file and waits for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from sqlalchemy import URL, AsyncAdaptedQueuePool, Pool, StaticPool
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import await_only

DRIVER = "sqlite+remat"
_THREADS = ThreadPoolExecutor(16, "sqlite")  # apart from where certificates are checked, for which no commit waits


class Connection(sqlite3.Connection):
    """A connection whose calls SQLAlchemy makes in a greenlet, from which they may await.

    Attributes:
        brief: statements run on the thread of the caller.
    """

    brief = False

    def cursor(self) -> Cursor:  # type: ignore[override]
        """A cursor."""
        return super().cursor(Cursor)  # type: ignore[arg-type]

    def at_once(self, statement: str) -> None:
        """Run a statement whose rows don't matter, here, outside of any greenlet too."""
        super().cursor(sqlite3.Cursor).execute(statement).close()

    async def run(self, statement: str, call: Callable[[], None]) -> None:
        """Run a statement here or in a thread."""
        if self.brief and statement != "BEGIN IMMEDIATE":
            call()
        else:
            await _in_thread(call)

    def commit(self) -> None:
        """Commit, in a thread."""
        if self.in_transaction:
            await_only(_in_thread(super().commit))


class Cursor(sqlite3.Cursor):
    """A cursor that has all of its rows once its statement has run."""

    connection: Connection

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._rows: deque[Any] = deque()

    def execute(self, statement: str, parameters: Any = ()) -> Cursor:
        """Run a statement."""
        await_only(self.connection.run(statement, partial(self._whole, super().execute, statement, parameters)))
        return self

    def executemany(self, statement: str, parameters: Any) -> Cursor:
        """Run a statement for each of these."""
        await_only(self.connection.run(statement, partial(self._whole, super().executemany, statement, parameters)))
        return self

    def _whole(self, call: Callable[..., Any], statement: str, parameters: Any) -> None:
        call(statement, parameters)
        self._rows = deque(super().fetchall() if self.description else ())

    def fetchone(self) -> Any:
        """The next row, or None."""
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = 1) -> list[Any]:
        """The next rows."""
        return [self._rows.popleft() for _ in range(min(size or 1, len(self._rows)))]

    def fetchall(self) -> list[Any]:
        """The rows that are left."""
        rows, self._rows = list(self._rows), deque()
        return rows

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while self._rows:
            yield self._rows.popleft()

    async def _async_soft_close(self) -> None:
        """Nothing is left open: SQLAlchemy asks for this after each statement."""


class Dialect(SQLiteDialect_pysqlite):
    """SQLAlchemy's own dialect of SQLite, over these connections."""

    driver = "remat"
    is_async = True
    supports_statement_cache = True

    @classmethod
    def get_pool_class(cls, url: URL) -> type[Pool]:
        """A pool whose waiters let the loop go on; a database in memory is one connection."""
        return AsyncAdaptedQueuePool if cls._is_url_file_db(url) else StaticPool

    def connect(self, *arguments: Any, **more: Any) -> Any:
        """A connection, for whichever thread asks, one at a time."""
        more |= {"factory": Connection, "isolation_level": None, "check_same_thread": False}
        return super().connect(*arguments, **more)


def raw_of(connection: AsyncConnection) -> Connection:
    """The driver's connection under one of SQLAlchemy's."""
    assert connection.sync_connection is not None
    raw: Any = connection.sync_connection.connection.dbapi_connection
    return cast(Connection, raw)


async def _in_thread(call: Callable[[], None]) -> None:
    """A call in a thread; who is cancelled waits for its end, so that a connection is never used by two."""
    work = asyncio.get_running_loop().run_in_executor(_THREADS, call)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise


registry.register("sqlite.remat", __name__, "Dialect")
