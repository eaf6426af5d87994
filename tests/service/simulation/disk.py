"""The connections of one simulated process to the database: SQLite's own, with a fault point at every statement."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from random import Random
from typing import Any

_STATEMENT_S = 0.003  # the most that a statement takes
_LOCK_S, _AGAIN_S = 10.0, 0.01  # as `busy_timeout`; between two tries
FAULTS = ("lost before the commit", "lost after the commit", "disk full")
_WRITES = ("INSERT", "UPDATE", "DELETE")


class Line:
    """What lies between one process and the database.

    Attributes:
        slow_s: seconds more that each statement takes.
        faults: those that happen at the next occasions, in order.
        dead: the process is no more: what it still asks for never comes; `over`: nor is the simulation.
        disturbed: there was a fault, or slowness, or a jump of the clock.
        on_commit: told of every commit that has changed something.
    """

    def __init__(self, dice: Random, on_commit: Callable[[], None]) -> None:
        self._dice, self.on_commit = dice, on_commit
        self.slow_s = 0.0
        self.faults: list[str] = []
        self.dead = self.over = self.disturbed = False
        self._open: list[Connection] = []

    async def connect(self, path: str, **_: Any) -> Connection:
        """A connection, as the driver opens one."""
        await self.point()
        connection = Connection(self, path)
        self._open.append(connection)
        return connection

    async def point(self) -> None:
        """A moment at which others run, the process may be killed, and time passes."""
        await self.alive()
        await asyncio.sleep(self._dice.uniform(0.0, _STATEMENT_S) + self.slow_s)
        await self.alive()

    async def alive(self) -> None:
        """Go on, unless the process is dead."""
        if self.over:
            raise sqlite3.OperationalError("connection closed")
        if self.dead:
            await asyncio.get_running_loop().create_future()

    def due(self, *kinds: str) -> str | None:
        """The fault that happens here, if the next one is of these kinds."""
        return self.faults.pop(0) if self.faults and self.faults[0] in kinds else None

    def kill(self) -> None:
        """The process dies; the database rolls back what it had open."""
        self.dead = True
        for connection in self._open:
            connection.raw.close()
        self._open.clear()

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        if connection in self._open:
            self._open.remove(connection)


class Connection:
    """What SQLAlchemy asks of a connection of aiosqlite, in the thread of the loop."""

    def __init__(self, line: Line, path: str) -> None:
        self.line = line
        self.raw = sqlite3.connect(path, isolation_level=None, timeout=0.0, check_same_thread=False)
        self._conn = self.raw
        self._tx = _Now()
        self.changes = 0

    @property
    def _connection(self) -> sqlite3.Connection | None:
        return self.raw

    @property
    def isolation_level(self) -> str | None:
        """As SQLite's."""
        return self.raw.isolation_level

    def cursor(self) -> Cursor:
        """A cursor."""
        return Cursor(self)

    async def create_function(self, *args: Any, **more: Any) -> None:
        """A function for SQL."""
        self.raw.create_function(*args, **more)

    async def commit(self) -> None:
        """Commit, unless the connection is lost before; it may be lost after."""
        await self.line.point()
        changed = self.raw.in_transaction and self.raw.total_changes > self.changes
        fault = self.line.due("lost before the commit", "lost after the commit") if changed else None
        if fault == "lost before the commit":
            self._lose()
        self.raw.commit()
        self.changes = self.raw.total_changes
        if changed:
            self.line.on_commit()
        if fault is not None:
            self._lose()

    async def rollback(self) -> None:
        """Roll back."""
        await self.line.alive()
        self.raw.rollback()
        self.changes = self.raw.total_changes

    async def close(self) -> None:
        """Close."""
        self.line.forget(self)
        self.raw.close()

    def stop(self) -> None:
        """Close at once."""
        self.line.forget(self)
        self.raw.close()

    def _lose(self) -> None:
        self.raw.rollback()
        raise sqlite3.OperationalError("connection closed")


class Cursor:
    """A cursor of such a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._cursor = connection, connection.raw.cursor()

    async def __aenter__(self) -> Cursor:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    async def execute(self, statement: str, parameters: Any = ()) -> None:
        """Run a statement; a writer waits for its turn."""
        await self._reach(statement)
        if statement.startswith("PRAGMA busy_timeout"):
            return  # SQLite would wait in real time; below it is waited in the loop's
        if statement != "BEGIN IMMEDIATE":
            self._cursor.execute(statement, parameters)
            return
        until = asyncio.get_running_loop().time() + _LOCK_S
        while True:
            try:
                self._cursor.execute(statement)
                return
            except sqlite3.OperationalError:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(_AGAIN_S)
            await self._connection.line.alive()

    async def executemany(self, statement: str, parameters: Any) -> None:
        """Run a statement for each of these."""
        await self._reach(statement)
        self._cursor.executemany(statement, parameters)

    async def fetchall(self) -> list[Any]:
        """The rows."""
        return self._cursor.fetchall()

    async def close(self) -> None:
        """Close."""
        self._cursor.close()

    async def _reach(self, statement: str) -> None:
        line = self._connection.line
        await line.point()
        if statement.startswith(_WRITES) and line.due("disk full"):
            raise sqlite3.OperationalError("database or disk is full")


class _Now:
    """In place of the queue of aiosqlite's thread."""

    def put_nowait(self, work: tuple[asyncio.Future[Any], Callable[[], Any]]) -> None:
        """Do it at once."""
        future, function = work
        future.set_result(function())
