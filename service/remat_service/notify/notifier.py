"""Waking those who wait: a bell a request and a bell a solve, rung when something about it has changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Bells:
    """Listen first, then look, then wait: a ring between the look and the wait is not lost."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}
        self.relay: Callable[[tuple[str, ...]], None] | None = None
        """Tells other processes of a ring, where there are any."""

    def listen(self, key: str) -> asyncio.Event:
        """The event that the next ring sets."""
        return self._waiting.setdefault(key, asyncio.Event())

    def ring(self, *keys: str) -> None:
        """Wake whoever listens to these, here and in other processes."""
        self.ring_here(*keys)
        if self.relay is not None and keys:
            self.relay(keys)

    def ring_here(self, *keys: str) -> None:
        """Wake whoever listens to these in this process."""
        for key in keys:
            event = self._waiting.pop(key, None)
            if event is not None:
                event.set()

    def ring_all(self) -> None:
        """Wake everybody: the server is stopping."""
        self.ring_here(*list(self._waiting))

    def listened(self) -> list[str]:
        """What somebody may be waiting for."""
        return list(self._waiting)


async def heard(event: asyncio.Event, seconds: float) -> bool:
    """Wait for a ring, at most so long."""
    if seconds <= 0:
        return event.is_set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # wait_for loses a cancellation that comes with the ring
            await event.wait()
    return event.is_set()
