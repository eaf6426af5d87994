"""`remat-service store` and `backup`: what is stored by which version of the solver, purged, copied."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import URL, delete, func, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import Invalid
from ..settings import Settings, driver_url
from ..storage.database import Database, read_only
from ..storage.database import migrate as prepare
from ..storage.seals import adopt_key, seals_of
from ..storage.tables import bounds, efforts, floors, plans, proofs
from ..tenants.administration import operator, record
from .transaction import in_database, opened

store_app = typer.Typer(no_args_is_help=True, help="List or remove what is stored, of all tenants.")

_PARTS = (("plans", plans), ("proofs", proofs), ("bounds", bounds), ("floors", floors), ("efforts", efforts))


@store_app.command("list")
def list_store() -> None:
    """Every version of the solver that something stored comes from, and how much."""

    async def work(connection: AsyncConnection) -> list[str]:
        every = union(*(select(table.c.solver) for _, table in _PARTS))
        lines = []
        for version in sorted((await connection.execute(every)).scalars()):
            counts = []
            for name, table in _PARTS:
                query = select(func.count()).select_from(table).where(table.c.solver == version)
                counts.append(f"{name} {await connection.scalar(query)}")
            lines.append(f"{version or 'unknown'}  {'  '.join(counts)}")
        return lines

    for line in in_database(work):
        typer.echo(line)


@store_app.command("purge")
def purge(
    solver: Annotated[str, typer.Option(help="Version of the solver, as `store list` names it.")],
) -> None:
    """Forget every plan, pinned ones too, and everything proved that one version of the solver has found.

    Answers that were given with such a plan are answered 410 from here on; servers need no restart.
    """
    version = "" if solver == "unknown" else solver

    async def work(connection: AsyncConnection) -> list[str]:
        found = []
        for name, table in _PARTS:
            done = await connection.execute(delete(table).where(table.c.solver == version))
            found.append(f"{name} {done.rowcount}")
        return found

    typer.echo("  ".join(in_database(work, "store purge", solver=solver)))


@store_app.command("adopt-key")
def adopt() -> None:
    """Take REMAT_SEAL_KEY for the store's key, where the one that sealed it is lost; without it, SQLite goes on
    unsealed. Nothing is removed.

    What the lost key has sealed is not believed: ids of earlier answers are answered 410, claims are found and profiles
    measured again. It is believed again once that key is found and stands in second place.
    """
    settings = Settings()

    async def work() -> None:
        database = Database(settings.database_url.get_secret_value())
        try:
            await prepare(database)
            async with database.write() as connection:
                await adopt_key(database, connection, seals_of(settings))
                await record(connection, operator(), "store adopt-key", {})
        finally:
            await database.close()

    asyncio.run(work())


def migrate(settings: Settings) -> None:
    """Bring the schema up to date."""

    async def work() -> None:
        async with opened(settings):
            pass

    asyncio.run(work())


def backup(target: Path) -> None:
    """Copy the SQLite database of the settings to a new file, also while a service runs on it.

    Raises:
        Invalid: the database is not SQLite, or not there, or the target is.
    """
    url = driver_url(Settings().database_url.get_secret_value())
    if not isinstance(url, URL):
        raise Invalid("this is not a SQLite database; use pg_dump")
    path = url.database or ":memory:"
    if not Path(path).exists():
        raise Invalid(f"there is no database {path}; see REMAT_DATABASE_URL")
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise Invalid(f"{target} is there already") from None
    source = sqlite3.connect(read_only(path), uri=True)
    copy = sqlite3.connect(target)
    try:
        source.backup(copy)
    finally:
        copy.close()
        source.close()
