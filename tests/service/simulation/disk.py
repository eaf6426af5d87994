"""The connections of one simulated process to the database: SQLite's own, with a fault point at every statement."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from random import Random

from sqlalchemy.util import await_only

from remat_service.storage import sqlite

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

    def connect(self, path: str) -> Connection:
        """A connection, as the driver opens one."""
        await_only(self.point())
        connection = Connection(path, isolation_level=None, timeout=0.0, check_same_thread=False)
        connection.line = self
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
            raise _closed()
        if self.dead:
            await asyncio.get_running_loop().create_future()

    def due(self, *kinds: str) -> str | None:
        """The fault that happens here, if the next one is of these kinds."""
        return self.faults.pop(0) if self.faults and self.faults[0] in kinds else None

    def kill(self) -> None:
        """The process dies; the database rolls back what it had open."""
        self.dead = True
        for connection in self._open:
            connection.drop()
        self._open.clear()

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        if connection in self._open:
            self._open.remove(connection)


class Connection(sqlite.Connection):
    """The driver's own connection; each statement, brief or not, runs in the thread of the loop after a fault point."""

    line: Line
    changes = 0

    async def run(self, statement: str, call: Callable[[], None]) -> None:
        """Run a statement; a writer waits for its turn."""
        await self.line.point()
        if statement.startswith(_WRITES) and self.line.due("disk full"):
            raise sqlite3.OperationalError("database or disk is full")
        if statement != "BEGIN IMMEDIATE":
            call()
            return
        until = asyncio.get_running_loop().time() + _LOCK_S
        while True:
            try:
                call()
                return
            except sqlite3.OperationalError:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(_AGAIN_S)
            await self.line.alive()

    def at_once(self, statement: str) -> None:
        """Run a statement; where SQLite would wait in real time, it is waited in the loop's."""
        if not statement.startswith("PRAGMA busy_timeout"):
            super().at_once(statement)

    def commit(self) -> None:
        """Commit, unless the connection is lost before; it may be lost after."""
        await_only(self.line.point())
        changed = self.in_transaction and self.total_changes > self.changes
        fault = self.line.due("lost before the commit", "lost after the commit") if changed else None
        if fault == "lost before the commit":
            self._lose()
        sqlite3.Connection.commit(self)
        self.changes = self.total_changes
        if changed:
            self.line.on_commit()
        if fault is not None:
            self._lose()

    def rollback(self) -> None:
        """Roll back; that of a dead process was the database's."""
        if not self.line.dead:
            super().rollback()
            self.changes = self.total_changes

    def close(self) -> None:
        """Close."""
        self.line.forget(self)
        super().close()

    def drop(self) -> None:
        """Close at once: nobody is left who would."""
        super().close()

    def _lose(self) -> None:
        super().rollback()
        raise _closed()


def _closed() -> sqlite3.Error:
    return sqlite3.ProgrammingError("Cannot operate on a closed database.")
