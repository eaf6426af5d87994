"""Waking those who wait: one event a request, a solve or a queue, set when something about it has changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Notifier:
    """Listen first, then look, then wait: a change between the look and the wait is not missed."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}
        self.relay: Callable[[tuple[str, ...]], None] | None = None
        """Tells other processes of a change, where there are any."""

    def listen(self, key: str) -> asyncio.Event:
        """The event that the next change under this key sets."""
        return self._waiting.setdefault(key, asyncio.Event())

    def notify(self, *keys: str) -> None:
        """Wake whoever listens to these, here and in other processes."""
        self.notify_here(*keys)
        if self.relay is not None and keys:
            self.relay(keys)

    def notify_here(self, *keys: str) -> None:
        """Wake whoever listens to these in this process."""
        for key in keys:
            event = self._waiting.pop(key, None)
            if event is not None:
                event.set()

    def notify_all(self) -> None:
        """Wake everybody: the server is stopping."""
        self.notify_here(*list(self._waiting))

    def listening(self) -> list[str]:
        """What somebody may be waiting for."""
        return list(self._waiting)


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait for a change, at most so long; returns whether it came."""
    if seconds <= 0:
        return event.is_set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # wait_for loses a cancellation that comes with the change
            await event.wait()
    return event.is_set()
