"""`remat-service store` and `backup`: what is stored by which version of the solver, purged, copied."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import delete, func, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import Invalid
from ..settings import Settings, driver_url
from ..storage.tables import bounds, efforts, floors, plans, proofs
from .transaction import in_database

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


def backup(target: Path) -> None:
    """Copy the SQLite database of the settings to a new file, also while a service runs on it.

    Raises:
        Invalid: the database is not SQLite, or the target is there.
    """
    url = driver_url(Settings().database_url.get_secret_value())
    path = url.removeprefix("sqlite+aiosqlite:///")
    if path == url:
        raise Invalid("this is not a SQLite database; use pg_dump")
    if target.exists():
        raise Invalid(f"{target} is there already")
    source = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    copy = sqlite3.connect(target)
    try:
        source.backup(copy)
    finally:
        copy.close()
        source.close()
