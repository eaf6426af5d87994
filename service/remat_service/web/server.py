"""Serving the application: a socket bound first, a line that says where, a stop in bounded time.

Connections are guarded before there is a request: how many there may be, and how long a head or a body may take to
come. uvicorn limits none of these. The guard looks at every connection once a second; one that is over its time is
closed. Where an address has too many, its oldest connection that has not sent a whole head makes room.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import signal
import socket
import sys
from contextlib import ExitStack
from typing import Any

import h11
import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..context import Context
from ..errors import ServiceError
from ..settings import Settings
from ..solving.dispatch import opened
from ..telemetry import exported
from ..tenants.keys import any_key
from .app import LOOPBACK, create_app

log = structlog.get_logger("remat_service.web.server")


_LOOK_S = 1.0
_GRACE_S = 5.0  # a route answers 408 to a late body before its connection is closed
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\ncontent-length: 0\r\n\r\n"


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ServiceError: the address can't be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6  # `::` is for IPv4 too
        listener = socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=both)
        # asyncio sets TCP_NODELAY only where the protocol is named, and create_server names none: each answer of two
        # writes would wait 40 ms for the client's delayed acknowledgement
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listener.detach())
    except OSError as error:
        raise ServiceError(f"can't listen on {host} port {port}: {error.strerror or error}") from None


def check_exposure(settings: Settings) -> None:
    """Refuse to listen beyond loopback without requiring keys.

    Raises:
        ServiceError: keys are not required.
    """
    if settings.host not in LOOPBACK and not settings.require_keys:
        raise ServiceError(
            f"{settings.host} is reachable from other machines: set REMAT_REQUIRE_KEYS=true and make a key with "
            "`remat-service keys create TENANT --new-tenant`, or listen on 127.0.0.1"
        )


def _warn(settings: Settings, has_key: bool) -> None:
    """Say what is closed to everybody, or open to everybody, on a server that requires keys."""
    if not settings.require_keys:
        return
    if settings.oidc_issuer is None and not has_key:
        log.warning("there is no API key: all are refused", make_one="remat-service keys create TENANT --new-tenant")
    if settings.metrics_key is None:
        log.warning("/metrics is open to all who reach this port", to_close_it="REMAT_METRICS_KEY")


async def _prepare(settings: Settings) -> bool:
    """What would fail behind the server's back fails here: no file, no right, no schema, another owner or seal key.

    Returns whether there is an API key.

    Raises:
        ServiceError: the database can't be used.
    """
    context = Context(settings)
    async with opened(context), context.database.read() as connection:
        return await any_key(connection)


class Server(uvicorn.Server):
    """Says where it listens once it does; on a signal it first turns not ready and lets waiting requests go."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, listener: socket.socket, exports: ExitStack) -> None:
        super().__init__(config)
        self._app, self._listener, self._exports = app, listener, exports

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then print the ready line on standard output."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there now stays: a large body has the collector look at what it brought alone
        context: Context = self._app.state.context
        while context.settings.embedded and not context.supervisor.tried.is_set() and not self.should_exit:
            await asyncio.sleep(0.02)  # it listens already, and answers from the store
        if self.started and not self.should_exit:
            host, port = self._listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"remat-service ready on http://{shown}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Not ready from here on, while a balancer takes notice; then long polls answer with what there is; the end.

        A poll that was answered at once would be sent again at once, to this very server, for as long as it listens.
        """
        context: Context = self._app.state.context
        context.stopping = True
        if not self.force_exit:
            await asyncio.sleep(context.settings.notice_s)
        context.leave()
        await super().shutdown(sockets)
        await asyncio.to_thread(self._exports.close)


def _allow_descriptors(connections: int) -> None:
    """Let the process have a descriptor a connection, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _give_back_memory() -> None:
    """Let glibc return every large buffer to the system: left alone it keeps what a large body once took."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def serve(settings: Settings) -> None:
    """Run until a signal."""
    has_key = asyncio.run(_prepare(settings))
    check_exposure(settings)
    _warn(settings, has_key)
    _allow_descriptors(settings.most_connections)
    _give_back_memory()
    listener = bound_socket(settings.host, settings.port)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        server_header=False,
        h11_max_incomplete_event_size=64 * 1024,
        http=guarded(settings),
    )
    exports = ExitStack()
    exports.enter_context(exported(app.state.context.metrics.registry, app))
    server = Server(config, app, listener, exports)
    for number in (signal.SIGTERM, signal.SIGINT):  # raised again by uvicorn once it has stopped: that is no failure
        signal.signal(number, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        exports.close()
    if not server.started:
        sys.exit(3)


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
        for connection in [each for of_address in self._open.values() for each in of_address]:
            if connection.is_late(moment, self._settings):
                connection.transport.abort()
        self._look = loop.call_later(_LOOK_S, self._sweep, loop) if self._count else None


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
