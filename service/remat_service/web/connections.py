"""Connections before there is a request: how many there may be, and how long a head or a body may take to come.

uvicorn limits none of these. The guard looks at every connection once a second; one that is over its time is closed.
Where an address has too many, its oldest connection that has not sent a whole head makes room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..settings import Settings

_LOOK_S = 1.0
_GRACE_S = 5.0  # a route answers 408 to a late body before its connection is closed
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\ncontent-length: 0\r\n\r\n"


class Guard:
    """The open connections of one server, by address, oldest first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[str, dict[GuardedProtocol, None]] = {}
        self._count = 0
        self._look: asyncio.TimerHandle | None = None

    def enter(self, connection: GuardedProtocol) -> bool:
        """Count a connection; False where there is no room for it."""
        mine = self._open.setdefault(connection.address, {})
        if len(mine) >= self._settings.most_connections_per_address or self._count >= self._settings.most_connections:
            idle = next((each for each in mine if each.awaits_head), None)
            if idle is None:
                self._forget(connection.address)
                return False
            self.leave(idle)
            idle.transport.abort()
            mine = self._open.setdefault(connection.address, {})
        mine[connection] = None
        self._count += 1
        if self._look is None:
            self._look = connection.loop.call_later(_LOOK_S, self._sweep, connection.loop)
        return True

    def leave(self, connection: GuardedProtocol) -> None:
        """A connection has ended."""
        mine = self._open.get(connection.address, {})
        if connection in mine:
            del mine[connection]
            self._count -= 1
        self._forget(connection.address)

    def _forget(self, address: str) -> None:
        if not self._open.get(address, True):
            del self._open[address]

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        moment = loop.time()
        for connection in list(self._all()):
            if connection.is_late(moment, self._settings):
                connection.transport.abort()
        self._look = loop.call_later(_LOOK_S, self._sweep, loop) if self._count else None

    def _all(self) -> Iterator[GuardedProtocol]:
        for mine in self._open.values():
            yield from mine


class GuardedProtocol(H11Protocol):
    """uvicorn's own protocol, counted and timed by a guard."""

    guard: Guard

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.address = ""
        self._state: Any = None
        self._seen: object = None
        self._since = 0.0

    @property
    def awaits_head(self) -> bool:
        """Whether no request is under way on it, and the next one's head has not come to its end."""
        return self.conn.their_state is h11.IDLE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection is accepted, or refused where there are too many."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._since = self.loop.time()
        if not self.guard.enter(self):
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self.guard.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._note(self.loop.time())

    def is_late(self, moment: float, settings: Settings) -> bool:
        """Whether a head, or a body, has been on its way for too long."""
        self._note(moment)
        if self._state is h11.IDLE:
            return moment - self._since > settings.head_timeout_s
        if self._state is h11.SEND_BODY:
            return moment - self._since > settings.body_timeout_s + _GRACE_S
        return False

    def _note(self, moment: float) -> None:
        if self.conn.their_state is not self._state or self.cycle is not self._seen:
            self._state, self._seen, self._since = self.conn.their_state, self.cycle, moment


def guarded(settings: Settings) -> type[GuardedProtocol]:
    """A protocol class for uvicorn whose connections share one guard."""
    return type("Guarded", (GuardedProtocol,), {"guard": Guard(settings)})
