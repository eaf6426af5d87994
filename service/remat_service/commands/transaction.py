"""The database of the settings for commands: its schema is brought up to date and its seal key checked first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import ServiceError
from ..settings import Settings
from ..storage import migrations
from ..storage.database import Database, migrate
from ..storage.seals import Seals, check_key, seals_at_hand
from ..tenants.administration import operator, record

T = TypeVar("T")


@asynccontextmanager
async def opened(settings: Settings, upgraded: bool = True) -> AsyncIterator[tuple[Database, Seals | None]]:
    """The database, and its seals where their key is at hand.

    Args:
        upgraded: bring its schema up to date first; else servers of an older version may run on it.

    Raises:
        ServiceError: the database can't be used, or the key is not the one that it is sealed with.
    """
    database = Database(settings.database_url.get_secret_value())
    try:
        seals = seals_at_hand(settings)
        if upgraded:
            await migrate(database)
        async with database.read() as connection:
            found = await connection.run_sync(migrations.current)
            if found != migrations.head():
                raise ServiceError(
                    f"the store is at revision {found or 'none'}, and this version of remat-service reads revision "
                    f"{migrations.head()}: use the version that serves it, or run `remat-service migrate`"
                )
            if seals is not None:
                await check_key(connection, seals)
        yield database, seals
    finally:
        await database.close()


def in_database(
    work: Callable[[AsyncConnection], Awaitable[T]],
    act: str | None = None,
    more: Callable[[T], Mapping[str, object]] | None = None,
    **about: object,
) -> T:
    """Run some work in one transaction on the database of the settings.

    Work that changes something is an `act`: it is written down, with what it is about, in the same transaction.

    Args:
        more: what the act is about besides, from what the work returns.

    Raises:
        ServiceError: as `opened`.
    """

    async def run() -> T:
        async with opened(Settings()) as (database, _), database.write() as connection:
            result = await work(connection)
            if act is not None:
                await record(connection, operator(), act, about | dict(more(result) if more is not None else {}))
            return result

    return asyncio.run(run())
