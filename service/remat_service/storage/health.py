"""Whether the database takes writes: looked at by writing, at most once a second however often it is asked."""

from __future__ import annotations

import asyncio
import os

from ..errors import ServiceError
from .database import Database, what_fails
from .seals import Seals, check_key
from .tables import probes

_FRESH_S = 1.0
_LIMIT_S = 5.0


class Health:
    """What the last look has found."""

    def __init__(self, database: Database, seals: Seals) -> None:
        self._database, self._seals = database, seals
        self._looked_at = -float("inf")
        self._wrong: str | None = None
        self._looking = asyncio.Lock()
        self._inode: int | None = None

    async def wrong(self) -> str | None:
        """What keeps the database from taking our writes, in a few words; None where nothing does."""
        async with self._looking:
            if self._database.clock.monotonic() - self._looked_at >= _FRESH_S:
                self._wrong = await self._look()
                self._looked_at = self._database.clock.monotonic()
            return self._wrong

    async def _look(self) -> str | None:
        try:
            if self._replaced():
                return "the database's file is gone or another one"
            async with asyncio.timeout(_LIMIT_S), self._database.write(brief=True) as connection:
                row = {"id": 1, "at": self._database.clock.now()}
                await connection.execute(self._database.upsert(probes, row, ("at",)))
                await check_key(connection, self._seals)
        except ServiceError:  # another process signs with a key that this one was not started with
            return "the store is sealed with a key that REMAT_SEAL_KEY does not name"
        except Exception as error:  # noqa: BLE001 – whatever fails is what readiness says
            return what_fails(error)
        return None

    def _replaced(self) -> bool:
        """Whether another file lies where the database was opened; SQLite goes on writing to one that is gone."""
        if self._database.file is None:
            return False
        found = os.stat(self._database.file).st_ino
        if self._inode is None:
            self._inode = found
        return found != self._inode
