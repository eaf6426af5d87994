"""`remat-service worker`: a process that solves and serves nothing but its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from contextlib import AsyncExitStack

import structlog
from prometheus_client import start_http_server

from ..context import build_context
from ..requests.housekeeping import housekeeping
from ..settings import Settings
from ..telemetry import exported
from .cluster import Fleet
from .lifespan import announce, opened

log = structlog.get_logger("remat_service.solving.worker")


async def work(settings: Settings, metrics_port: int = 0) -> None:
    """Run until SIGTERM or SIGINT; solves under way are given back to the queue within `drain_s`."""
    context = build_context(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(exported(context.metrics.registry))
        await stack.enter_async_context(opened(context))
        server = start_http_server(metrics_port, registry=context.metrics.registry) if metrics_port else None
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
            server[0].shutdown()
