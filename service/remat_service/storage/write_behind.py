"""Requests that were answered from memory, written to the database a moment later, many in one transaction.

Where this process is the only one (SQLite), whoever asks for such a request by its id waits for the write. Where
several share the database, another may be asked at once, so each row is written before its answer goes out. A crash
loses the rows of the last moment: answers that their callers have, and can have again with another POST.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from sqlalchemy import Column, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from ..outage import Outage
from .database import Database
from .store import Store
from .tables import requests, tenants

log = structlog.get_logger("remat_service.storage.write_behind")

_SOON_S = 0.05
_MOST_ROWS = 2_000


class WriteBehind:
    """Rows of `requests` on their way into the database."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database, self._store = database, store
        self._rows: dict[str, dict[str, Any]] = {}
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def add(self, row: dict[str, Any]) -> None:
        """Take a row; it is written before this returns, or soon."""
        self._rows[row["id"]] = row
        if not self._database.is_sqlite or len(self._rows) >= _MOST_ROWS:
            await self.flush()
        elif self._task is None:
            self._task = asyncio.create_task(self._soon())

    def holds(self, request_id: str) -> bool:
        """Whether the row of a request is still on its way."""
        return request_id in self._rows

    def holds_key(self, tenant_id: str, key: str) -> bool:
        """Whether a row with this idempotency key is still on its way."""
        return any(row["idempotency_key"] == key and row["tenant_id"] == tenant_id for row in self._rows.values())

    async def flush(self) -> None:
        """Write what was taken up to now."""
        async with self._writing:
            rows = list(self._rows.values())
            if not rows:
                return
            try:
                async with self._database.write() as connection:
                    await connection.execute(requests.insert(), rows)
                    await self._touch(connection, rows)
            except IntegrityError:
                async with self._database.write() as connection:
                    await self._insert_what_can_be(connection, rows)
                    await self._touch(connection, rows)
            for row in rows:
                self._rows.pop(row["id"], None)

    async def _insert_what_can_be(self, connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
        """Write what is not there yet: an attempt before may have been committed and not heard of.

        A row whose idempotency key another one has, since a retry came in twice at once, is written without it; one of
        a tenant that is gone is left out.
        """
        tenants_there = await _among(connection, tenants.c.id, {row["tenant_id"] for row in rows})
        rows = [row for row in rows if row["tenant_id"] in tenants_there]
        if not rows:
            return
        await connection.execute(self._database.insert(requests).on_conflict_do_nothing(), rows)
        there = await _among(connection, requests.c.id, {row["id"] for row in rows})
        others = [row | {"idempotency_key": None, "body_hash": None} for row in rows if row["id"] not in there]
        if others:
            await connection.execute(requests.insert(), others)

    async def _touch(self, connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
        for graph_key, plan_id in sorted({(row["graph_key"], row["plan_id"] or "") for row in rows}):
            await self._store.touch(connection, graph_key, plan_id or None)

    async def _soon(self) -> None:
        outage = Outage(log, "writing requests down")
        while self._rows:
            await asyncio.sleep(_SOON_S)
            try:
                await self.flush()
                outage.over()
            except Exception as error:
                outage.failed(error)
        self._task = None

    async def close(self) -> None:
        """Write what is left."""
        if self._task is not None:
            self._task.cancel()
        await self.flush()


async def _among(connection: AsyncConnection, column: Column[str], values: set[str]) -> set[str]:
    """Those of the values that a table has."""
    return set(await connection.scalars(select(column).where(column.in_(values))))
