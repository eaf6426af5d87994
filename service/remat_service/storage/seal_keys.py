"""Whether this process's seal key is the store's: sealed rows that say nothing but by which key.

`seal_keys` has one row a key that any process was started with; one of them `signs`. A process that lacks that key
would take whatever the others store for damaged, so it is refused; so is one that would sign, in a store that several
processes share, with a key that no process was started with as a second one before.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import ServiceError
from . import migrations
from .database import Database
from .seals import Seals
from .tables import bounds, efforts, profiles, requests, seal_keys

_LATEST = 20  # of each table, in a store that is older than `seal_keys`

_WRONG = (
    "REMAT_SEAL_KEY is not the key that this store is sealed with, so nothing that it has sealed would be believed; "
    "set the right one (earlier versions kept that of SQLite in a file *.seal-key next to the database). If it is "
    "lost, run `remat-service store adopt-key`"
)
_NONE = (
    "this store is sealed, and REMAT_SEAL_KEY is not set (earlier versions kept the key of SQLite in a file *.seal-key "
    "next to the database); to go on without seals, run `remat-service store adopt-key`"
)
_ORDER = (
    "REMAT_SEAL_KEY begins with a key that the other servers and workers do not know yet; start all of them with "
    "`old,new` first, then with `new,old`"
)


async def check_key(connection: AsyncConnection, seals: Seals) -> None:
    """Refuse keys of which none is the one that the store is sealed with now.

    Raises:
        ServiceError: they are of another store, or of another time.
    """
    rows = (await connection.execute(select(seal_keys))).all()
    ours = seals.of_keys()
    signing = [row.seal for row in rows if row.signs]
    if signing and not set(signing) & set(ours):
        raise ServiceError(_WRONG if ours else _NONE)
    if ours and not rows and not await _holds_something(connection, seals):
        raise ServiceError(_WRONG)


async def take_key(database: Database, connection: AsyncConnection, seals: Seals) -> None:
    """Note the keys that a process starts with, once they are checked: the first one signs from here on.

    Raises:
        ServiceError: as `check_key`; or it would sign before the other processes know its key.
    """
    await connection.run_sync(migrations.lock)
    await check_key(connection, seals)
    known = set((await connection.execute(select(seal_keys.c.seal))).scalars())
    ours = seals.of_keys()
    if known and ours[0] not in known and not database.is_sqlite:
        raise ServiceError(_ORDER)
    await _note(database, connection, ours)


async def adopt_key(database: Database, connection: AsyncConnection, seals: Seals) -> None:
    """Make these keys the store's, whatever it was sealed with; without one, it is sealed no longer."""
    await connection.execute(delete(seal_keys))
    await _note(database, connection, seals.of_keys())


async def _note(database: Database, connection: AsyncConnection, ours: list[str]) -> None:
    if not ours:
        return
    rows = [{"seal": one, "signs": False, "at": database.clock.now()} for one in ours]
    await connection.execute(database.insert(seal_keys).values(rows).on_conflict_do_nothing())
    await connection.execute(update(seal_keys).values(signs=seal_keys.c.seal == ours[0]))


async def _holds_something(connection: AsyncConnection, seals: Seals) -> bool:
    """Whether any of the latest sealed rows holds, or there is none."""
    found: list[tuple[Table, dict[str, Any]]] = []
    for table in (requests, bounds, efforts, profiles):
        query = select(table).where(table.c.seal.is_not(None)).order_by(table.c.created_at.desc()).limit(_LATEST)
        found += [(table, dict(row)) for row in (await connection.execute(query)).mappings()]
    return not found or any(seals.holds(table.name, row) for table, row in found)
