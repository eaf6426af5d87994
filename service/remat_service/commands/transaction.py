"""A command's work in one transaction on the database of the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ..settings import Settings
from ..storage.database import Database
from ..storage.prepare import migrate
from ..tenants.administration import operator, record

T = TypeVar("T")


def in_database(work: Callable[[AsyncConnection], Awaitable[T]], act: str | None = None, **about: object) -> T:
    """Run some work in one transaction on the database of the settings, its schema up to date.

    Work that changes something is an `act`: it is written down, with what it is about, in the same transaction.
    """

    async def run() -> T:
        database = Database(Settings().database_url.get_secret_value())
        try:
            await migrate(database)
            async with database.write() as connection:
                result = await work(connection)
                if act is not None:
                    await record(connection, operator(), act, about)
                return result
        finally:
            await database.close()

    return asyncio.run(run())
