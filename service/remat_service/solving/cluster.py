"""Many workers on PostgreSQL: Procrastinate wakes them, the `solves` table says what there is to do.

A job is a ticket: enqueued in the transaction that writes the solve, it makes some worker take the solve that is due
next, which need not be the one that came with it; so priorities and fair shares between tenants hold whatever the
queue's own order is. A ticket too many finds nothing to do; one too few is made up for by the reconciler.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import timedelta

import procrastinate
import structlog
from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..context import Context
from ..notify.postgres import libpq_url
from ..storage.database import try_lock
from ..storage.tables import now, solves
from .dispatch import next_solve
from .execute import execute_solve

log = structlog.get_logger("remat_service.solving.cluster")

QUEUE = "remat"
TASK = "remat.execute"
_RECONCILE_S = 5.0
_AGAIN_S = 2.0

_DEFER = text(
    "SELECT procrastinate_defer_jobs_v1(ARRAY[ROW(:queue, :task, :priority, NULL, NULL, CAST(:args AS jsonb), NULL)"
    "::procrastinate_job_to_defer_v1])"
)


async def enqueue(connection: AsyncConnection, solve_id: str, priority: int) -> None:
    """A ticket, in the transaction of the caller: both are there, or neither."""
    arguments = {"queue": QUEUE, "task": TASK, "priority": priority, "args": json.dumps({"solve_id": solve_id})}
    await connection.execute(_DEFER, arguments)


def queue_app(context: Context) -> procrastinate.App:
    """Procrastinate's application, with the one task there is."""
    connector = procrastinate.PsycopgConnector(conninfo=libpq_url(context.database.url), min_size=1, max_size=4)
    app = procrastinate.App(connector=connector)

    @app.task(name=TASK, queue=QUEUE)
    async def execute(solve_id: str) -> None:
        await take_one(context, solve_id)

    return app


async def take_one(context: Context, solve_id: str) -> str | None:
    """Execute the solve that is due next; the ticket's own where nothing else is. Returns which it was."""
    tried: set[str] = set()
    while (due := await next_solve(context, frozenset(tried))) is not None:
        if await execute_solve(context, due):
            return due
        tried.add(due)  # another worker was quicker
    return None


async def run_worker(context: Context) -> None:
    """Take tickets until told to stop; a restart of the database is waited out."""
    with contextlib.suppress(OSError, TimeoutError):
        await context.supervisor.warm()
    while not context.stopping:
        app = queue_app(context)
        try:
            async with app.open_async():
                await app.run_worker_async(
                    queues=[QUEUE],
                    name=context.name,
                    concurrency=context.settings.workers,
                    shutdown_graceful_timeout=context.settings.drain_s,
                    install_signal_handlers=False,
                    delete_jobs="always",
                    update_heartbeat_interval=10.0,
                    stalled_worker_timeout=context.settings.stale_after_s,
                    fetch_job_polling_interval=5.0,
                )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("the worker lost its queue; trying again", error=str(error).strip()[:200])
        await asyncio.sleep(_AGAIN_S)


async def reconcile_for_ever(context: Context) -> None:
    """Every few seconds, in every process: what workers left behind is taken up again."""
    while not context.stopping:
        try:
            await reconcile(context)
        except Exception as error:
            log.warning("reconciling failed; trying again", error=str(error).strip()[:200])
        await asyncio.sleep(min(_RECONCILE_S, context.settings.stale_after_s))


async def reconcile(context: Context) -> dict[str, int]:
    """The reaper and the reconciler: silent solves are queued again, dead tickets dropped, missing ones added."""
    stale = now() - timedelta(seconds=context.settings.stale_after_s)
    async with context.database.write() as connection:
        if not await try_lock(connection, 0x72656170):  # one process at a time is enough, of however many
            return {"requeued": 0, "dropped": 0, "added": 0}
        silent = await connection.execute(
            update(solves)
            .where(solves.c.state == "running", solves.c.heartbeat_at < stale)
            .values(state="queued", worker=None, revision=solves.c.revision + 1)
        )
        dead = await connection.execute(
            text(
                "DELETE FROM procrastinate_jobs j WHERE j.queue_name = :queue AND j.status = 'doing' AND NOT EXISTS "
                "(SELECT 1 FROM procrastinate_workers w WHERE w.id = j.worker_id AND w.last_heartbeat > :since)"
            ),
            {"queue": QUEUE, "since": stale},
        )
        queued = await connection.scalar(select(func.count()).select_from(solves).where(solves.c.state == "queued"))
        tickets = await connection.scalar(
            text("SELECT count(*) FROM procrastinate_jobs WHERE queue_name = :queue AND status = 'todo'"),
            {"queue": QUEUE},
        )
        missing = max(0, (queued or 0) - (tickets or 0))
        if missing:
            rows = await connection.execute(
                select(solves.c.id, solves.c.priority)
                .where(solves.c.state == "queued")
                .order_by(solves.c.queued_at.desc())
                .limit(missing)
            )
            for row in rows.all():
                await enqueue(connection, row.id, row.priority)
    found = {"requeued": silent.rowcount, "dropped": dead.rowcount, "added": missing}
    if any(found.values()):
        log.info("reconciled", **found)
    return found
