"""Writes of one process to SQLite: those that wait for their turn share a transaction.

SQLite has one write lock, and a transaction costs more than what most of them write. One task gives the turns. It
begins a transaction, lets one writer after another use it, and commits when nobody waits or enough have had their turn.
A writer goes on when its transaction is committed, so what it answers is stored. Its own part is a savepoint: an error
in it undoes that part, and an error of the transaction as a whole is everybody's.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .sqlite import raw_of


class _Turn:
    """One writer's: it is given the connection, says how its part went, and is told that it is stored."""

    def __init__(self, brief: bool) -> None:
        self.brief = brief
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[AsyncConnection] = loop.create_future()
        self.ended: asyncio.Future[bool] = loop.create_future()
        self.stored: asyncio.Future[None] = loop.create_future()

    @property
    def given_up(self) -> bool:
        """Whether the writer went away before its turn."""
        return self.begun.cancelled()

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
        while self._waiting and self._waiting[0].given_up:
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
        except Exception as error:
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
