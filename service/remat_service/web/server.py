"""Serving the application: a socket bound first, a line that says where, a stop in bounded time."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import signal
import socket
import sys
from contextlib import ExitStack

import structlog
import uvicorn
from fastapi import FastAPI

from ..context import Context
from ..errors import ServiceError
from ..settings import Settings
from ..storage.database import Database
from ..storage.prepare import migrate, sole_owner
from ..storage.seals import seals_of, take_key
from ..telemetry import exported
from ..tenants.keys import any_key
from .app import LOOPBACK, create_app
from .connections import guarded

log = structlog.get_logger("remat_service.web.server")


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ServiceError: the address can't be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        raise ServiceError(f"can't listen on {host} port {port}: {error.strerror or error}") from None
    return bound


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


def _warn(settings: Settings) -> None:
    """Say what is closed to everybody, or open to everybody, on a server that requires keys."""
    if not settings.require_keys:
        return
    if settings.oidc_issuer is None and not asyncio.run(_any_key(settings)):
        log.warning("there is no API key: all are refused", make_one="remat-service keys create TENANT --new-tenant")
    if settings.metrics_key is None:
        log.warning("/metrics is open to all who reach this port", to_close_it="REMAT_METRICS_KEY")


async def _prepare(settings: Settings) -> None:
    """What would fail behind the server's back fails here: no file, no right, no schema, another owner or seal key.

    Raises:
        ServiceError: the database can't be used.
    """
    database = Database(settings.database_url.get_secret_value())
    try:
        with sole_owner(database):
            await migrate(database)
            async with database.write() as connection:
                await take_key(database, connection, seals_of(settings))
    finally:
        await database.close()


async def _any_key(settings: Settings) -> bool:
    database = Database(settings.database_url.get_secret_value())
    try:
        async with database.read() as connection:
            return await any_key(connection)
    finally:
        await database.close()


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
    asyncio.run(_prepare(settings))
    check_exposure(settings)
    _warn(settings)
    _allow_descriptors(settings.most_connections)
    _give_back_memory()
    listener = bound_socket(settings.host, settings.port)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
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
