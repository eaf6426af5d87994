"""`remat-service solves`, `top`, `store`, `history`, `migrate` and `backup`, and the database in which commands work.

Before a command works in it, the database's schema is brought up to date and its seal key checked.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from pydantic import SecretStr
from sqlalchemy import URL, delete, func, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from ..context import Context
from ..errors import Invalid, ServiceError
from ..requests import operate
from ..settings import Settings, driver_url
from ..storage import migrations
from ..storage.database import Database
from ..storage.database import migrate as bring_up_to_date
from ..storage.seals import Seals, adopt_key, check_key, seals_of
from ..storage.tables import bounds, efforts, floors, plans, proofs
from ..tenants.keys import acts, operator, record

T = TypeVar("T")
DatabaseUrl = Annotated[str | None, typer.Option(help="sqlite:///PATH or postgresql://…")]


@asynccontextmanager
async def opened(
    settings: Settings, upgraded: bool = True, checked: bool = True
) -> AsyncIterator[tuple[Database, Seals | None]]:
    """The database, and its seals where their key is at hand.

    Args:
        upgraded: bring its schema up to date first; else servers of an older version may run on it.
        checked: the key has to be the one that it is sealed with.

    Raises:
        ServiceError: the database can't be used, or the key is not the one that it is sealed with.
    """
    database = Database(settings.database_url.get_secret_value())
    try:
        seals = None if settings.seal_key is None else seals_of(settings)
        if upgraded:
            await bring_up_to_date(database)
        async with database.read() as connection:
            found = await connection.run_sync(migrations.current)
            if not migrations.serves(found):
                raise ServiceError(
                    f"the store is at revision {found or 'none'}, and this version of remat-service reads revision "
                    f"{migrations.head()}: use the version that serves it, or run `remat-service migrate`"
                )
            if seals is not None and checked:
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


solves_app = typer.Typer(no_args_is_help=True, help="Solves of all tenants.")


def in_context(work: Callable[[Context], Awaitable[T]]) -> T:
    """Run some work with a process's share of the service over the database of the settings; it solves nothing.

    Raises:
        ServiceError: the database can't be used, or the key is not the one that it is sealed with.
    """

    async def run() -> T:
        async with opened(Settings()) as (database, _):
            context = Context(Settings(), database)
            async with database.read() as connection:
                await check_key(connection, context.seals)
            return await work(context)

    return asyncio.run(run())


@solves_app.command("list")
def list_solves(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    state: Annotated[Literal["queued", "running", "ended"] | None, typer.Option(help="Only these.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many of the latest.")] = 100,
) -> None:
    """Every solve, newest first: id, tenant, state, method, who works on it, how many requests wait for it."""
    for row in in_database(lambda connection: operate.list_solves(connection, tenant, state, limit)):
        typer.echo(
            f"{row.id}  {row.tenant}  {row.state}  {row.method}  {row.worker or '-'}  {row.requests} waiting  "
            f"{row.spent_s:.1f} s  {row.queued_at}"
        )


@solves_app.command("cancel")
def cancel(ids: Annotated[list[str], typer.Argument(help="Ids of solves, as `solves list` prints them.")]) -> None:
    """End solves: every request that waits for one is answered with what was found so far."""
    typer.echo(f"{in_context(lambda context: operate.end_solves(context, operator(), ids))} requests ended")


def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
) -> None:
    """Show who works, what waits and runs of each tenant, and the store, until it is interrupted."""
    while True:
        lines = lines_of(in_context(operate.overview))
        typer.echo("\n".join(lines if once else ["\033[2J\033[H" + lines[0], *lines[1:]]))
        if once:
            return
        time.sleep(every)


def lines_of(found: operate.Overview) -> list[str]:
    """The operators' view as lines of a terminal."""
    hour = found.last_hour
    lines = [
        f"remat-service {found.version}  {'ready' if found.ready else 'not ready'}",
        f"workers  {found.workers_busy} busy of {found.workers_alive} alive",
        f"solves   {found.running} running  {found.queued} waiting  oldest {_seconds(found.oldest_queued_s, ' s')}",
        f"store    {found.store_bytes / 2**20:.1f} MiB",
        f"1 hour   {hour.requests} requests  {hour.hits} from the store, which saved {hour.saved_s:.0f} s  "
        f"plans saved {hour.saved_bytes / 2**30:.1f} GiB  "
        f"{hour.solves} solves  {hour.failures} failed",
        "",
        f"{'tenant':<30} {'running':>8} {'waiting':>8} {'oldest s':>9} {'solver s':>10}",
    ]
    return lines + [
        f"{each.tenant[:30]:<30} {each.running:>8} {each.queued:>8} {_seconds(each.oldest_queued_s):>9} "
        f"{each.solver_seconds:>10.1f}"
        for each in found.tenants
    ]


def _seconds(number: float | None, unit: str = "") -> str:
    return "-" if number is None else f"{number:.0f}{unit}"


store_app = typer.Typer(no_args_is_help=True, help="List or remove what is stored, of all tenants.")

_PARTS = (plans, proofs, bounds, floors, efforts)


@store_app.command("list")
def list_store() -> None:
    """Every version of the solver that something stored comes from, and how much."""

    async def work(connection: AsyncConnection) -> list[str]:
        every = union(*(select(table.c.solver) for table in _PARTS))
        lines = []
        for version in sorted(await connection.scalars(every)):
            counts = [
                f"{table.name} {await connection.scalar(select(func.count()).where(table.c.solver == version))}"
                for table in _PARTS
            ]
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
        return [
            f"{table.name} {(await connection.execute(delete(table).where(table.c.solver == version))).rowcount}"
            for table in _PARTS
        ]

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
        async with opened(settings, checked=False) as (database, _), database.write() as connection:
            await adopt_key(database, connection, seals_of(settings))
            await record(connection, operator(), "store adopt-key", {})

    asyncio.run(work())


def migrate(database_url: DatabaseUrl = None) -> None:
    """Bring the database's schema up to date."""

    async def work() -> None:
        async with opened(Settings() if database_url is None else Settings(database_url=SecretStr(database_url))):
            pass

    asyncio.run(work())


def history(limit: Annotated[int, typer.Option(min=1, help="How many of the latest acts.")] = 100) -> None:
    """Print who has changed tenants, keys, groups or the store: one JSON object per line, oldest first."""
    for row in in_database(lambda connection: acts(connection, limit)):
        typer.echo(json.dumps({"at": row.at.isoformat(), "actor": row.actor, "act": row.act, **row.about}))


def backup(target: Annotated[Path, typer.Argument(help="The new file.")]) -> None:
    """Copy a SQLite database, also while a service runs on it."""
    url = driver_url(Settings().database_url.get_secret_value())
    if not isinstance(url, URL):
        raise Invalid("this is not a SQLite database; use pg_dump")
    path = url.database or ":memory:"
    if not Path(path).exists():
        raise Invalid(f"there is no database {path}; see REMAT_DATABASE_URL")
    try:
        target.touch(0o600, exist_ok=False)
    except FileExistsError:
        raise Invalid(f"{target} is there already") from None
    source = Path(path).absolute().as_uri() + "?mode=ro"  # whatever its name is
    with closing(sqlite3.connect(source, uri=True)) as store, closing(sqlite3.connect(target)) as copy:
        store.backup(copy)
