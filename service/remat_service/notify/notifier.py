"""Waking those who wait: a subscription to a request, a solve or a queue, set when something about it has changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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

    def __len__(self) -> int:
        return len(self._listeners)
