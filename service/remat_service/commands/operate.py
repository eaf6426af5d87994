"""`remat-service solves` and `top`: what runs and waits, of all tenants, and how it is ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer

from ..context import Context, build_context
from ..errors import Invalid
from ..requests import operate
from ..requests.completion import cancel_solve
from ..settings import Settings
from ..storage.seals import check_key
from ..tenants.administration import operator, record
from .transaction import in_database, opened

T = TypeVar("T")

solves_app = typer.Typer(no_args_is_help=True, help="Solves of all tenants.")


def in_context(work: Callable[[Context], Awaitable[T]]) -> T:
    """Run some work with a process's share of the service over the database of the settings; it solves nothing.

    Raises:
        ServiceError: the database can't be used, or the key is not the one that it is sealed with.
    """

    async def run() -> T:
        async with opened(Settings()) as (database, _):
            context = build_context(Settings(), database)
            async with database.read() as connection:
                await check_key(connection, context.seals)
            return await work(context)

    return asyncio.run(run())


@solves_app.command("list")
def list_solves(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those that are queued, running or ended.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many of the latest.")] = 100,
) -> None:
    """Every solve, newest first: id, tenant, state, method, who works on it, how many requests wait for it."""
    if state is not None and state not in operate.STATES:
        raise Invalid(f"unknown state {state!r}; there are: {', '.join(operate.STATES)}")
    for row in in_database(lambda connection: operate.list_solves(connection, tenant, state, limit)):
        typer.echo(
            f"{row['id']}  {row['tenant']}  {row['state']}  {row['method']}  {row['worker'] or '-'}  "
            f"{row['requests']} waiting  {row['spent_s']:.1f} s  {row['queued_at']}"
        )


@solves_app.command("cancel")
def cancel(ids: Annotated[list[str], typer.Argument(help="Ids of solves, as `solves list` prints them.")]) -> None:
    """End solves: every request that waits for one is answered with what was found so far."""

    async def work(context: Context) -> int:
        ended = 0
        for solve_id in ids:
            ended += await cancel_solve(context, solve_id)
        async with context.database.write() as connection:
            await record(connection, operator(), "solves cancel", {"solves": ids, "requests": ended})
        return ended

    typer.echo(f"{in_context(work)} requests ended")


def top(every_s: float, rounds: int) -> None:
    """Print the operators' view again and again; `rounds` 0 means until it is interrupted."""
    done = 0
    while True:
        found = in_context(operate.overview)
        if rounds != 1:
            typer.echo("\033[2J\033[H", nl=False)
        for line in lines_of(found):
            typer.echo(line)
        done += 1
        if done == rounds:
            return
        time.sleep(every_s)


def lines_of(found: dict[str, Any]) -> list[str]:
    """The operators' view as lines of a terminal."""
    oldest, hour = found["oldest_queued_s"], found["last_hour"]
    lines = [
        f"remat-service {found['version']}  {'ready' if found['ready'] else 'not ready'}",
        f"workers  {found['workers_busy']} busy of {found['workers_alive']} alive",
        f"solves   {found['running']} running  {found['queued']} waiting  "
        f"oldest {'-' if oldest is None else f'{oldest:.0f} s'}",
        f"store    {found['store_bytes'] / 2**20:.1f} MiB",
        f"1 hour   {hour['requests']} requests  {hour['hits']} from the store, which saved {hour['saved_s']:.0f} s  "
        f"{hour['solves']} solves  {hour['failures']} failed",
        "",
        f"{'tenant':<30} {'running':>8} {'waiting':>8} {'oldest s':>9} {'solver s':>10}",
    ]
    for each in found["tenants"]:
        since = each["oldest_queued_s"]
        lines.append(
            f"{each['tenant'][:30]:<30} {each['running']:>8} {each['queued']:>8} "
            f"{'-' if since is None else f'{since:.0f}':>9} {each['solver_seconds']:>10.1f}"
        )
    return lines
