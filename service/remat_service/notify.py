"""Waking those who wait: a subscription to a request, a solve or a queue, set when something about it has changed.

Between processes PostgreSQL's LISTEN and NOTIFY carry the keys of what has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import psycopg
import structlog
from sqlalchemy import URL

from .storage.database import Outage

log = structlog.get_logger("remat_service.notify")

_CHANNEL = "remat_bells"  # the name that servers and workers of other versions listen on
_FLUSH_S = 0.02
_AGAIN_S = 1.0
_KEYS_A_NOTE = 200  # of 32 characters: a payload is limited to 8,000 bytes


class Subscription:
    """What one listener is told. Reset, then look, then wait: a change between the look and the wait is not missed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """Forget the changes up to now: the listener is about to look."""
        self._changed.clear()

    def set(self) -> None:
        """Something has changed."""
        self._changed.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for a change, at most so long; returns whether it came."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):  # wait_for loses a cancellation that comes with the change
                    await self._changed.wait()
        return self._changed.is_set()


class Notifier:
    """Who listens to which key; a key is held for as long as somebody listens to it."""

    def __init__(self) -> None:
        self._listeners: dict[str, dict[Subscription, None]] = {}  # in the order of their coming
        self.relay: Callable[[tuple[str, ...]], None] | None = None
        """Tells other processes of a change, where there are any."""

    @contextmanager
    def subscribe(self, *keys: str) -> Iterator[Subscription]:
        """Changes under any of these keys, up to the end of the block."""
        subscription = Subscription()
        for key in keys:
            self._listeners.setdefault(key, {})[subscription] = None
        try:
            yield subscription
        finally:
            for key in set(keys):
                self._listeners[key].pop(subscription, None)
                if not self._listeners[key]:
                    del self._listeners[key]

    def notify(self, *keys: str) -> None:
        """Wake whoever listens to these, here and in other processes."""
        self.notify_here(*keys)
        if self.relay is not None and keys:
            self.relay(keys)

    def notify_here(self, *keys: str) -> None:
        """Wake whoever listens to these in this process."""
        for key in keys:
            for subscription in self._listeners.get(key, ()):
                subscription.set()

    def notify_all(self) -> None:
        """Wake everybody: the server is stopping, or changes may have been missed."""
        self.notify_here(*self._listeners)

    def keys(self) -> frozenset[str]:
        """What is listened to."""
        return frozenset(self._listeners)


class PostgresRelay:
    """Sends keys out in small batches and wakes for those that come in. For a lost note there is a poller."""

    def __init__(self, url: URL, notifier: Notifier) -> None:
        self._conninfo = libpq_url(url)
        self._notifier = notifier
        self._waiting: set[str] = set()
        self._some = asyncio.Event()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Go on up to the end of the block, also across restarts of the database."""
        self._notifier.relay = self.send
        tasks = [asyncio.create_task(self._keep(work)) for work in (self._listen, self._notify)]
        try:
            yield
        finally:
            self._notifier.relay = None
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def send(self, keys: tuple[str, ...]) -> None:
        """Tell the other processes."""
        self._waiting.update(keys)
        self._some.set()

    async def _keep(self, work: Callable[[psycopg.AsyncConnection[tuple[object, ...]]], Awaitable[None]]) -> None:
        outage = Outage(log, f"the relay's part {work.__name__.strip('_')}")
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                    outage.over()
                    await work(connection)
            except psycopg.Error as error:
                outage.failed(error)
            await asyncio.sleep(_AGAIN_S)

    async def _listen(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        await connection.execute(f"LISTEN {_CHANNEL}")
        self._notifier.notify_all()  # whatever was missed while disconnected
        async for note in connection.notifies():
            self._notifier.notify_here(*note.payload.split(","))

    async def _notify(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(_FLUSH_S)
            self._some.clear()
            keys = sorted(self._waiting)
            for start in range(0, len(keys), _KEYS_A_NOTE):
                batch = keys[start : start + _KEYS_A_NOTE]
                await connection.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, ",".join(batch)))
                self._waiting.difference_update(batch)


def libpq_url(url: URL) -> str:
    """A SQLAlchemy URL as libpq reads it."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)
