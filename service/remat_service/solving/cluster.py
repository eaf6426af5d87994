"""Many workers on PostgreSQL, over Procrastinate, through its public API alone.

The engine decides that a solve is taken: it delivers tickets, keeps the number that run at once, says which worker is
dead, and delivers a dead one's tickets again. Which solve a ticket takes is decided in the `solves` table alone
(`dispatch.next_solve`), and who may write to it by the fencing token of its claim: an engine of jobs knows no fair
shares between tenants, no quota of running solves, and no token. docs/service.md has the whole division.

A ticket is deferred in the transaction that writes the solve. A ticket too many finds nothing to do; one too few, and
a solve whose ticket nobody works on any longer, is found by a task that the engine runs every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

import procrastinate
import structlog
from procrastinate.job_context import JobContext
from procrastinate.jobs import Job, Status
from procrastinate.manager import JobManager
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..context import Context
from ..notify.postgres import libpq_url
from ..outage import Outage
from ..storage.database import try_lock
from ..storage.tables import solves
from .dispatch import next_solve
from .execute import execute_solve

log = structlog.get_logger("remat_service.solving.cluster")

QUEUE, TASK = "remat", "remat.execute"
_UPKEEP_QUEUE, _UPKEEP_TASK = "remat-upkeep", "remat.reconcile"
_EVERY_FIVE_SECONDS = "* * * * * */5"
_LOCK = 0x72656170  # of our own: the engine's would stay with a dead worker until a round of this very task frees it
_AGAIN_S = 2.0


class Reconciled(NamedTuple):
    """What one round has found: solves put back, tickets of dead workers delivered again, tickets added."""

    requeued: int
    retried: int
    added: int


class Queue:
    """The engine's side of a process: defers tickets, and in a worker takes them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._manager = self._app().job_manager  # not opened: it defers on the connections of others

    def _app(self) -> procrastinate.App:
        """The engine's application with its two tasks; another for every time that it is opened."""
        url = libpq_url(self._context.database.url)
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=4))

        @app.task(name=TASK, queue=QUEUE, pass_context=True)
        async def execute(job: JobContext) -> None:
            await take_one(self._context, job.job.id)

        @app.periodic(cron=_EVERY_FIVE_SECONDS, queueing_lock=_UPKEEP_TASK)
        @app.task(name=_UPKEEP_TASK, queue=_UPKEEP_QUEUE)
        async def upkeep(timestamp: int) -> None:
            await self.reconcile(app.job_manager)

        return app

    async def enqueue(self, connection: AsyncConnection) -> None:
        """A ticket, in the transaction of the caller: both are there, or neither."""
        await _ticket(self._manager, (await connection.get_raw_connection()).driver_connection)

    async def run(self) -> None:
        """Take tickets until told to stop; a restart of the database is waited out."""
        context = self._context
        with contextlib.suppress(OSError, TimeoutError):
            await context.supervisor.warm()
        outage = Outage(log, "taking tickets")
        while not context.stopping:
            try:
                async with self._app().open_async() as app:
                    await self.reconcile(app.job_manager)
                    outage.over()
                    await app.run_worker_async(
                        queues=[QUEUE, _UPKEEP_QUEUE],
                        name=context.name,
                        concurrency=context.settings.workers,
                        shutdown_graceful_timeout=context.settings.drain_s,
                        install_signal_handlers=False,
                        delete_jobs="always",
                        update_heartbeat_interval=context.settings.heartbeat_s,
                        stalled_worker_timeout=context.settings.stale_after_s,
                        fetch_job_polling_interval=5.0,
                    )
            except asyncio.CancelledError:
                raise
            except Exception as error:
                outage.failed(error)
            await asyncio.sleep(_AGAIN_S)

    async def reconcile_once(self) -> Reconciled:
        """One round, on connections of its own."""
        async with self._app().open_async() as app:
            return await self.reconcile(app.job_manager)

    async def reconcile(self, manager: JobManager) -> Reconciled:
        """Put back solves whose ticket no live worker holds, deliver such tickets again, and add missing ones."""
        async with self._context.database.write() as holder:
            if not await try_lock(holder, _LOCK):  # one process at a time is enough, of however many
                return Reconciled(0, 0, 0)
            requeued, retried = await self._put_back(manager)
            found = Reconciled(requeued, retried, await self._add_missing(manager))
        if any(found):
            log.info("reconciled", **found._asdict())
        return found

    async def _put_back(self, manager: JobManager) -> tuple[int, int]:
        """A running solve is alive exactly while its ticket is held by a worker that the engine counts as alive."""
        async with self._context.database.read() as connection:  # before the tickets: a later claim is none of these
            query = select(solves.c.id, solves.c.attempt, solves.c.ticket).where(solves.c.state == "running")
            running = (await connection.execute(query)).all()
        limit_s = self._context.settings.stale_after_s
        dead = {job.id: job for job in await manager.get_stalled_jobs(queue=QUEUE, seconds_since_heartbeat=limit_s)}
        held = {job.id for job in await manager.list_jobs_async(queue=QUEUE, task=TASK, status="doing")} - set(dead)
        requeued = 0
        async with self._context.database.write() as connection:
            for row in running:
                if row.ticket in held:
                    continue
                done = await connection.execute(
                    update(solves)
                    .where(solves.c.id == row.id, solves.c.attempt == row.attempt, solves.c.state == "running")
                    .values(state="queued", worker=None, ticket=None, revision=solves.c.revision + 1)
                )
                requeued += done.rowcount
        for job in dead.values():
            await manager.retry_job(job)
        for job in await manager.get_stalled_jobs(queue=_UPKEEP_QUEUE, seconds_since_heartbeat=limit_s):
            assert job.id is not None  # as every job that was read
            await manager.finish_job_by_id_async(job.id, Status.FAILED, delete_job=True)  # this round is in its place
        return requeued, len(dead)

    async def _add_missing(self, manager: JobManager) -> int:
        waiting = sum(row["todo"] for row in await manager.list_queues_async(queue=QUEUE, task=TASK))
        async with self._context.database.write() as connection:
            queued = await connection.scalar(select(func.count()).select_from(solves).where(solves.c.state == "queued"))
            missing: int = max(0, (queued or 0) - waiting)
            raw = (await connection.get_raw_connection()).driver_connection
            if missing:
                await _ticket(manager, raw, missing)
        return missing


async def _ticket(manager: JobManager, connection: Any, count: int = 1) -> None:
    job = Job(id=None, queue=QUEUE, lock=None, queueing_lock=None, task_name=TASK)
    await manager.batch_defer_jobs_async([job] * count, connection=connection)


async def take_one(context: Context, ticket: int | None = None) -> str | None:
    """Execute the solve that is due next, under a ticket. Returns which it was."""
    tried: set[str] = set()
    while (due := await next_solve(context, frozenset(tried))) is not None:
        if await execute_solve(context, due, ticket):
            return due
        tried.add(due)  # another worker was quicker
    return None
