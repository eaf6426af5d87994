"""SQLite for SQLAlchemy's asyncio, on the thread of the event loop where a statement is brief; writers share commits.

A statement that an index answers takes SQLite some tens of microseconds, and a trip to another thread and back several
times that; a driver with a thread of its own makes three trips a statement. So what is marked as brief
(`Database.read(brief=True)`) runs where it is asked for. All else goes to a thread: statements that look at a table,
the wait for the write lock, and each commit, which at times moves the log into the file and waits for the disk.

SQLite has one write lock, and a transaction costs more than what most of them write. So writers that wait share one
(`Writes`). One task begins a transaction, lets one writer after another use it, and commits when nobody waits or enough
have had their turn. A writer goes on when its transaction is committed, so what it answers is stored. Its own part is a
savepoint: an error in it undoes that part, and an error of the transaction as a whole is everybody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from sqlalchemy import URL, AsyncAdaptedQueuePool, Pool, StaticPool
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import await_only

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


class _Turn:
    """One writer's: it is given the connection, says how its part went, and is told that it is stored."""

    def __init__(self, brief: bool) -> None:
        self.brief = brief
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[AsyncConnection] = loop.create_future()
        self.ended: asyncio.Future[bool] = loop.create_future()
        self.stored: asyncio.Future[None] = loop.create_future()

    def fail(self, error: BaseException) -> None:
        """Nothing of it is stored."""
        waits = self.stored if self.begun.done() else self.begun
        if not waits.done():
            waits.set_exception(error)
            waits.exception()  # seen: the writer may be gone


class Writes:
    """The writers of one engine.

    Args:
        most: writers of one transaction; the first one waits for the last.
    """

    def __init__(self, engine: AsyncEngine, most: int) -> None:
        self._engine, self._most = engine, most
        self._waiting: deque[_Turn] = deque()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def turn(self, brief: bool) -> AsyncIterator[AsyncConnection]:
        """A connection to write to; the block's end waits for the commit."""
        turn = _Turn(brief)
        self._waiting.append(turn)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield await turn.begun
        except BaseException:
            turn.ended.set_result(False)
            raise
        turn.ended.set_result(True)
        await turn.stored

    async def end(self) -> None:
        """Wait until nobody writes."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._next():
                await self._transaction()
        finally:
            self._task = None

    def _next(self) -> _Turn | None:
        while self._waiting and self._waiting[0].begun.cancelled():  # the writer went away before its turn
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    async def _transaction(self) -> None:
        """One transaction, with all who wait for it."""
        had: list[_Turn] = []
        began = False
        try:
            async with self._engine.connect() as connection:
                await connection.execution_options(remat_writer=True)
                async with connection.begin():
                    began = True
                    await self._turns(connection, had)
        except _Undone:
            return
        except Exception as error:  # noqa: BLE001 – each writer that waits is told
            if not began:  # the lock was not to be had in time, and nobody waits as long once more
                had, self._waiting = list(self._waiting), deque()
            for turn in had:
                turn.fail(error)
            return
        for turn in had:
            if not turn.stored.done():
                turn.stored.set_result(None)

    async def _turns(self, connection: AsyncConnection, had: list[_Turn]) -> None:
        raw = raw_of(connection)
        while len(had) < self._most and (turn := self._next()) is not None:
            self._waiting.popleft()
            nested = bool(had)
            if nested:
                raw.at_once("SAVEPOINT turn")
            raw.brief = turn.brief
            turn.begun.set_result(connection)
            if await turn.ended:
                had.append(turn)
            elif nested:
                raw.at_once("ROLLBACK TO turn")
            else:  # all that there is to undo is its own
                raise _Undone
            if nested:
                raw.at_once("RELEASE turn")
            if not raw.in_transaction:
                raise sqlite3.OperationalError("SQLite has rolled the transaction back")


class _Undone(Exception):
    """The first writer of a transaction has failed, and there is nothing to commit."""
