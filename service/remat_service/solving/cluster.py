"""Many workers on PostgreSQL: Procrastinate carries the work to them, through its public API alone.

The engine has one task, which names no solve. A job of it is deferred in the transaction that lets a solve wait
(`storage/queue.py`); the worker that gets the job claims the solve that is due, and one that finds none to claim ends
at once. So jobs and solves that wait need not be equal in number, and nothing makes them so. Worker processes, their
concurrency, their graceful end and being woken in milliseconds are the engine's. Who is alive is not: a lease in the
table says so.

A job may get lost: with the worker that had fetched it, or since its tenant was at its limit. So every worker looks,
every few seconds and in no slot of the solves', whether something may run and no job waits, and defers what is missing.

`work` is `remat-service worker`: a process that solves and serves nothing but its metrics and whether it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any
from wsgiref.simple_server import WSGIServer

import procrastinate
import structlog
from procrastinate.job_context import JobContext
from procrastinate.jobs import Job, Status
from procrastinate.manager import JobManager
from prometheus_client import start_http_server
from sqlalchemy.ext.asyncio import AsyncConnection

from ..context import Context
from ..notify import libpq_url
from ..requests.completion import housekeeping
from ..settings import Settings
from ..storage.database import Outage, try_lock
from ..telemetry import exported
from .dispatch import announce, opened
from .run import execute

log = structlog.get_logger("remat_service.solving.cluster")

QUEUE, TASK = "remat", "remat.execute"
_LOOK_S = 2.0
_LOCK = 0x72656170
_AGAIN_S = 2.0
_MOST_JOBS = 1_000  # deferred in one round


class Fleet:
    """The engine's side of a process: a server defers jobs, a worker runs them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._manager = self._app().job_manager  # not opened: it defers on the connections of others

    def _app(self) -> procrastinate.App:
        """The engine's application with its task; another for every time that it is opened."""
        url = libpq_url(self._context.database.engine.url)
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=4))

        @app.task(name=TASK, queue=QUEUE, pass_context=True)
        async def take(job: JobContext) -> None:
            claimed = await self._context.queue.claim(self._context.name, job.job.id)
            if claimed is not None:
                await execute(self._context, claimed)

        return app

    async def carry(self, connection: AsyncConnection, count: int) -> None:
        """Defer jobs in the transaction of the caller: they are there with what it writes, or not at all."""
        job = Job(id=None, queue=QUEUE, lock=None, queueing_lock=None, task_name=TASK)
        raw = (await connection.get_raw_connection()).driver_connection
        await self._manager.batch_defer_jobs_async([job] * count, connection=raw)

    async def run(self) -> None:
        """Run jobs until told to stop; a restart of the database is waited out."""
        context, outage = self._context, Outage(log, "taking jobs")
        while not context.stopping:
            with outage:
                async with self._app().open_async() as app:
                    await _forget_jobs_of_the_dead(app.job_manager, context.settings.stale_after_s)
                    outage.over()  # it goes on for as long as the worker does
                    upkeep = asyncio.create_task(self.upkeep(app.job_manager))
                    try:
                        await app.run_worker_async(
                            queues=[QUEUE],
                            name=context.name,
                            concurrency=context.settings.workers,
                            shutdown_graceful_timeout=context.settings.drain_s,
                            install_signal_handlers=False,
                            delete_jobs="always",
                            update_heartbeat_interval=context.settings.heartbeat_s,
                            stalled_worker_timeout=context.settings.stale_after_s,
                            fetch_job_polling_interval=5.0,
                        )
                    finally:
                        upkeep.cancel()
            await asyncio.sleep(_AGAIN_S)

    async def upkeep(self, manager: JobManager) -> None:
        """Take over from dead workers and defer missing jobs, for ever, apart from the slots of the solves."""
        outage = Outage(log, "upkeep of the queue")
        while True:
            with outage:
                await self.round(manager)
            await asyncio.sleep(_LOOK_S)

    async def round(self, manager: JobManager) -> tuple[int, int]:
        """One round: how many solves were taken over, and how many jobs were missing."""
        context = self._context
        taken, missing = await context.queue.take_over(), 0
        context.metrics.taken_over.inc(taken)
        async with context.database.write() as connection:
            if await try_lock(connection, _LOCK):  # one process at a time is enough, of however many
                ready = sum(each.free for each in await context.queue.waiting(connection))
                if ready and not any(row["todo"] for row in await manager.list_queues_async(queue=QUEUE, task=TASK)):
                    missing = min(ready, _MOST_JOBS)
                    await self.carry(connection, missing)
        if taken or missing:
            log.info("upkeep of the queue", taken_over=taken, jobs_deferred=missing)
        return taken, missing

    async def once(self) -> tuple[int, int]:
        """One round, on connections of its own."""
        async with self._app().open_async() as app:
            return await self.round(app.job_manager)


async def _forget_jobs_of_the_dead(manager: JobManager, stale_after_s: float) -> None:
    """Remove what dead workers had fetched: their solves are taken over without it."""
    for job in await manager.get_stalled_jobs(queue=QUEUE, seconds_since_heartbeat=stale_after_s):
        assert job.id is not None  # as every job that was read
        with contextlib.suppress(procrastinate.exceptions.ConnectorException):  # another worker was quicker
            await manager.finish_job_by_id_async(job.id, Status.FAILED, delete_job=True)


async def work(settings: Settings, metrics_port: int = 0) -> None:
    """Run until SIGTERM or SIGINT; solves under way are given back to the queue within `drain_s`."""
    context = Context(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(exported(context.metrics.registry))
        await stack.enter_async_context(opened(context))
        server = _say_how_it_is(context, metrics_port) if metrics_port else None
        announced = asyncio.create_task(announce(context))
        with contextlib.suppress(OSError, TimeoutError):  # tried again with the first solve
            await context.supervisor.warm()
        await announced
        tasks = [asyncio.create_task(Fleet(context).run()), asyncio.create_task(housekeeping(context))]
        print(f"remat-service worker ready: {context.name}, {settings.workers} at once", flush=True)
        await stop.wait()
        log.info("worker stopping")
        context.stopping = True
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                async with asyncio.timeout(settings.drain_s + 10.0):
                    await task
        if server is not None:
            server.shutdown()


def _say_how_it_is(context: Context, port: int) -> WSGIServer:
    """Serve the metrics on a port, and at `/readyz` whether the database takes what this worker finds."""
    server, _ = start_http_server(port, registry=context.metrics.registry)
    metrics, loop = server.get_app(), asyncio.get_running_loop()
    assert metrics is not None

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/readyz":
            return metrics(environ, start_response)
        wrong = asyncio.run_coroutine_threadsafe(context.health.wrong(), loop).result()
        start_response("503 Service Unavailable" if wrong else "200 OK", [("Content-Type", "text/plain")])
        return [(wrong or "ready").encode()]

    server.set_app(answer)
    return server
