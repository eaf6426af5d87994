"""The service over HTTP: one client, from an event loop (`AsyncHttp`) or from a thread that waits (`Http`).

A deadline holds whatever the server is sending: it ends the task that reads, since a timeout of a read starts anew with
every byte.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from ..errors import ServiceError
from . import encoding
from .call import FIRST_PAUSE_S, NO_REPLY, RETRIES, Call, Reply, Timeouts, common_headers

log = logging.getLogger("remat")


class AsyncHttp:
    """A service by its base URL, for one event loop.

    Args:
        at_once: connections open at once.
        transport: what carries the requests; tests plug the real application in here, in-process.
        sleep: the clock of the retries.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: int = RETRIES,
        at_once: int = 64,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.base_url, self.timeouts, self.retries = base_url, timeouts or Timeouts(), retries
        self._sleep = sleep
        self._away_since: float | None = None
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            headers=common_headers(api_key),
            transport=transport,
            follow_redirects=False,
            trust_env=transport is None,
            limits=httpx2.Limits(max_connections=at_once),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def call(self, method: str, path: str, **given: Any) -> Reply:
        """One logical call.

        Args:
            given: as for `Call.of`: `body`, a JSON value to send; `params`, `headers`; `wait_s`, seconds that the
                service was asked to hold the reply; `give_up_at`, the moment of `time.monotonic()` after which no
                attempt starts and none goes on; `wait_until`, the one up to which a service that is away is waited for,
                beyond the usual retries.

        Raises:
            ServiceError: one of its kinds, with the service's request id where it gave one.
        """
        call = Call.of(self.base_url, self.timeouts, method, path, **given)
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, ServiceError) and call.may_pass(error)),
            wait=lambda state: _pause(call, state),
            stop=lambda state: self._ends(call, state),
            before_sleep=lambda state: self._note_away(call, state),
            sleep=self._sleep,
            reraise=True,
        )
        reply: Reply = await retrying(self._once, call)
        if self._away_since is not None:
            log.info("%s answers again, after %.0f s", self.base_url, time.monotonic() - self._away_since)
            self._away_since = None
        return reply

    def _ends(self, call: Call, state: RetryCallState) -> bool:
        """Whether no attempt follows on one that has failed."""
        tried = state.attempt_number > self.retries and not call.waits_for(_error(state))
        return tried or time.monotonic() + state.upcoming_sleep > call.give_up_at

    def _note_away(self, call: Call, state: RetryCallState) -> None:
        """That a service is away is said once, and once that it is back."""
        if state.attempt_number > 1 and self._away_since is None and call.waits_for(_error(state)):
            self._away_since = time.monotonic()
            left = call.wait_until - self._away_since
            log.warning("%s; waiting for the service, %.0f s at most", _error(state), left)

    async def _once(self, call: Call) -> Reply:
        try:
            async with asyncio.timeout(call.seconds()):
                raw, reply = await self._exchange(call)
        except NO_REPLY as error:
            raise call.failed(error) from None
        return await asyncio.to_thread(call.read, reply, raw) if len(raw) > MUCH else call.read(reply, raw)

    async def _exchange(self, call: Call) -> tuple[bytes, httpx2.Response]:
        """One request and its reply's whole body, inflated."""
        timeouts = call.timeouts
        async with self._client.stream(
            call.method,
            call.path,
            content=call.content,
            params=dict(call.params),
            headers=dict(call.headers),
            timeout=httpx2.Timeout(
                timeouts.connect, read=timeouts.read + call.wait_s, write=timeouts.write, pool=timeouts.connect
            ),
        ) as reply:
            body = encoding.Body(reply.headers.get("Content-Encoding", ""))
            async for piece in reply.aiter_bytes():
                body.add(piece)
        return body.whole(), reply


MUCH = 1 << 20
"""Bytes of a reply that is parsed outside of the event loop."""


def _error(state: RetryCallState) -> ServiceError:
    error = None if state.outcome is None else state.outcome.exception()
    assert isinstance(error, ServiceError), "only these are tried again"
    return error


def _pause(call: Call, state: RetryCallState) -> float:
    """Seconds before the next attempt. What the service advises is a floor; the jitter above it keeps many ranks from
    coming back in one instant."""
    error = _error(state)
    jittered = wait_random_exponential(multiplier=FIRST_PAUSE_S, max=call.longest_pause_s(error))(state)
    return jittered + (getattr(error, "retry_after_s", None) or 0.0)


_LOOPS: list[asyncio.AbstractEventLoop] = []
"""The one that carries the calls of threads that wait; it runs in a thread that does not keep the process."""

_STARTING = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _STARTING:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            threading.Thread(target=_LOOPS[0].run_forever, name="remat-http", daemon=True).start()
        return _LOOPS[0]


def _after_fork() -> None:
    """A process that is forked has no thread of its parent's: it starts a loop of its own."""
    global _STARTING
    _STARTING = threading.Lock()
    _LOOPS.clear()


os.register_at_fork(after_in_child=_after_fork)


class Http:
    """A service by its base URL, for threads that wait for its replies.

    Args:
        more: as for `AsyncHttp`.
    """

    def __init__(self, base_url: str, **more: Any) -> None:
        self.base_url, self._more = base_url, more
        self._clients: dict[asyncio.AbstractEventLoop, AsyncHttp] = {}
        weakref.finalize(self, _close, self._clients).atexit = False

    def __repr__(self) -> str:
        return f"Http({self.base_url!r})"

    def close(self) -> None:
        """Close the connections."""
        _close(self._clients)

    def call(self, method: str, path: str, **given: Any) -> Reply:
        """One logical call: see `AsyncHttp.call`; an interrupt ends it.

        Raises:
            ServiceError: one of its kinds, with the service's request id where it gave one.
        """
        future = asyncio.run_coroutine_threadsafe(self._call(method, path, given), _loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _call(self, method: str, path: str, given: dict[str, Any]) -> Reply:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            self._clients.clear()  # of a process that has forked
            client = self._clients[loop] = AsyncHttp(self.base_url, **self._more)
        return await client.call(method, path, **given)


def _close(clients: dict[asyncio.AbstractEventLoop, AsyncHttp]) -> None:
    for loop, client in list(clients.items()):
        if loop in _LOOPS:
            asyncio.run_coroutine_threadsafe(client.close(), loop)
    clients.clear()
