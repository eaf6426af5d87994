"""What memories are made of: a bound, and one at a time who fills a place in them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A mapping that forgets; the newest entry stays, whatever its size. For one thread, such as the event loop's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def get(self, key: K) -> V | None:
        """What is held under a key, used just now."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Hold a value of some size under a key."""
        self.drop(key)
        self._held[key] = value, size
        self.size += size
        while self.size > self._most and len(self._held) > 1:
            self.size -= self._held.popitem(last=False)[1][1]

    def drop(self, key: K) -> None:
        """Forget what is held under a key, if anything is."""
        self.size -= self._held.pop(key, (None, 0))[1]


class KeyedLocks:
    """A lock a key, for as long as somebody holds or awaits it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """The lock of a key, for `async with`."""
        return self._locks.setdefault(key, asyncio.Lock())
