"""The in-process dispatcher: claims solves that wait and runs them in this process's children."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from ..context import Context
from ..outage import Outage
from .execute import execute

log = structlog.get_logger("remat_service.solving.dispatch")

_LOOK_S = 1.0


class Dispatcher:
    """Runs up to `settings.workers` solves at once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._running: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take solves."""
        self._loop = asyncio.create_task(self._dispatch())

    async def stop(self) -> None:
        """Stop taking solves, and give those that run back to the queue: what they found so far is stored."""
        tasks = [task for task in (self._loop, *self._running) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    async def _dispatch(self) -> None:
        context = self._context
        try:
            await context.supervisor.warm()
        except (OSError, TimeoutError):
            log.exception("no solver child can be started; trying again with the first solve")
        outage = Outage(log, "looking at the queue")
        with context.notifier.subscribe("queue") as changes:
            while not context.stopping:
                changes.reset()
                try:
                    context.metrics.taken_over.inc(await context.queue.take_over())
                    await self._take()
                    outage.over()
                except Exception as error:
                    outage.failed(error)
                    await asyncio.sleep(_LOOK_S)
                await changes.wait(_LOOK_S)

    async def _take(self) -> None:
        """Start what is due, up to the number of workers."""
        context = self._context
        while len(self._running) < context.settings.workers:
            claimed = await context.queue.claim(context.name)
            if claimed is None:
                return
            task = asyncio.create_task(execute(context, claimed))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._context.notifier.notify("queue")
