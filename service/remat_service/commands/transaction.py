"""A command's work in one transaction on the database of the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ..settings import Settings
from ..storage import migrations
from ..storage.database import Database

T = TypeVar("T")


def in_database(work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Run some work in one transaction on the database of the settings, its schema up to date."""

    async def run() -> T:
        database = Database(Settings().database_url.get_secret_value())
        try:
            async with database.write() as connection:
                await connection.run_sync(migrations.upgrade)
                return await work(connection)
        finally:
            await database.close()

    return asyncio.run(run())
