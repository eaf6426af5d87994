"""Calls to the service over HTTP: what is sent, how long an attempt may take, what a reply means, when to try again.

Two retries from half a second with full jitter, on 408, 409, 429, 5xx and connection errors; Retry-After is honoured;
one idempotency key per logical call, the same on every retry; bodies and replies are compressed, and read up to a
bound. A service that is away, or whose database is, is waited for until a moment that the caller names: a restart costs
nobody an answer. A deadline holds whatever the server is sending: it ends the task that reads, since a timeout of a
read starts anew with every byte.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from remat_ir import InvalidData, readable
from remat_ir.read import parse

from ..errors import (
    InvalidResponse,
    NotAllowed,
    NotFound,
    RateLimited,
    Refused,
    ServiceError,
    ServiceFailed,
    Unreachable,
)
from ..settings import checked_key

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

log = logging.getLogger("remat")

ACCEPTED_ENCODING = "zstd"
COMPRESS_ABOVE = 8_192
"""Bytes below which a body is sent as it is: the saving would not pay for the header."""

LARGEST_REPLY = 512 * 1024 * 1024
"""Bytes that a reply may inflate to; a plan of 50 million steps does not travel."""


MOST_CONTAINERS, MOST_VALUES = 2_000_000, 8_000_000
"""Arrays and objects, and values of any kind, that a reply may hold: some hundred MB once parsed; a plan has one array
a step."""


class Unusable(ValueError):
    """A body that inflates, or would be parsed, beyond the bound, or in an encoding that was not asked for."""


class Body:
    """The body of a reply, from pieces that have been inflated, of a bounded size each.

    Raises:
        Unusable: it is in an encoding that was not asked for; in `add`, it is too large.
    """

    def __init__(self, encoding: str, most: int = LARGEST_REPLY) -> None:
        if encoding.strip().lower() not in ("", "identity", ACCEPTED_ENCODING):
            raise Unusable(f"unknown content encoding {encoding!r}")
        self._most, self._pieces = most, list[bytes]()
        self._total = self._containers = self._values = 0

    def add(self, piece: bytes) -> None:
        """What comes next; no more than one piece beyond the bound is ever held."""
        self._total += len(piece)
        if self._total > self._most:
            raise Unusable(f"the body is larger than {readable(self._most)}")
        self._containers += piece.count(b"[") + piece.count(b"{")
        self._values += piece.count(b",")
        if self._containers > MOST_CONTAINERS or self._values > MOST_VALUES:
            raise Unusable(f"the body holds more than {MOST_CONTAINERS} arrays or {MOST_VALUES} values")
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """All of it."""
        return b"".join(self._pieces)


RETRIED = frozenset({408, 409, 429})
AWAY = frozenset({502, 503, 504})
"""A proxy without its server, a server that stops, is full, or is without its database: it will be back."""
RETRIES = 2
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
LONGEST_AWAY_PAUSE_S = 2.0
"""Between two looks for a service that is away."""
MOST_PATIENCE_S = 60.0
"""A Retry-After beyond this is passed on to the caller rather than slept through."""


class Timeouts(NamedTuple):
    """Seconds for each part of a call; a long poll adds its own wait to `read`."""

    connect: float = 5.0
    read: float = 15.0
    write: float = 60.0


class Reply(NamedTuple):
    """A reply that was not an error: its status, headers, and the JSON value of its body."""

    status: int
    headers: Mapping[str, str]
    data: Any


class Call:
    """One logical call, whoever carries it: it sends a JSON value, or nothing where it is neither POST nor PUT.

    Args:
        body: what is sent; None: an object without members.
        wait_s: seconds that the service was asked to hold the reply.
        give_up_at: the moment of `time.monotonic()` after which no attempt starts, and none goes on.
        wait_until: the moment up to which a service that is away is waited for, beyond the usual retries.
    """

    def __init__(
        self,
        base_url: str,
        timeouts: Timeouts,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        give_up_at: float = float("inf"),
        wait_until: float = 0.0,
    ) -> None:
        self.base_url, self.timeouts, self.method, self.path = base_url, timeouts, method, path
        self.wait_s, self.give_up_at, self.wait_until = wait_s, give_up_at, wait_until
        self.params, self.headers = dict(params or {}), dict[str, str]()
        self.content: bytes | None = None
        if method in ("POST", "PUT"):
            self.content = json.dumps({} if body is None else body, separators=(",", ":")).encode()
            self.headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
            if len(self.content) > COMPRESS_ABOVE:
                self.content = zstd.compress(self.content)
                self.headers["Content-Encoding"] = "zstd"

    @property
    def name(self) -> str:
        """The call in a message."""
        return f"{self.method} {self.path}"

    def seconds(self) -> float:
        """For an attempt that begins now, all of it."""
        left = max(0.05, self.give_up_at - time.monotonic())
        return min(left, self.timeouts.write + self.timeouts.read + self.wait_s)

    def failed(self, error: Exception) -> ServiceError:
        """The error for an attempt that brought no reply."""
        if isinstance(error, (httpx2.TimeoutException, TimeoutError)):
            return Unreachable(f"{self.base_url} did not answer {self.name} in time")
        if isinstance(error, (Unusable, httpx2.DecodingError)):
            return InvalidResponse(f"{self.base_url} answered {self.name} with a body of no use: {error}")
        return Unreachable(f"{self.base_url} could not be reached for {self.name}: {_first_cause(error)}")

    def read(self, reply: httpx2.Response, raw: bytes) -> Reply:
        """What a reply with this body says.

        Raises:
            ServiceError: one of its kinds, with the service's request id where it gave one.
        """
        if not 200 <= reply.status_code < 300:
            raise _refusal(self.base_url, reply, raw, self.name)
        try:
            data = parse(raw) if raw else None
        except InvalidData as error:
            raise InvalidResponse(
                f"{self.base_url} answered {self.name} with nonsense: {error}", request_id=_request_id(reply, None)
            ) from None
        return Reply(reply.status_code, reply.headers, data)

    def may_pass(self, error: ServiceError) -> bool:
        """Whether another attempt could help, and is advised within the time that a caller is patient."""
        if isinstance(error, (RateLimited, ServiceFailed)):
            return error.retry_after_s is None or error.retry_after_s <= MOST_PATIENCE_S
        if isinstance(error, Refused):
            return error.status in RETRIED
        return not isinstance(error, InvalidResponse)

    def waits_for(self, error: ServiceError) -> bool:
        """Whether a service that failed so is away, and is to be waited for."""
        away = isinstance(error, Unreachable) or (isinstance(error, ServiceFailed) and error.status in AWAY)
        return away and time.monotonic() < self.wait_until


def come_back_s(reply: Reply, asked_s: float, held_s: float, give_up_at: float) -> float:
    """Seconds before the next poll: none after one that was held as asked, else what the service advises.

    Args:
        asked_s, held_s: how long the reply was to be held, and how long it was.
    """
    if reply.status != 202 or held_s >= 0.9 * asked_s:
        return 0.0
    advised = _retry_after(reply.headers)
    return max(
        0.0, min(FIRST_PAUSE_S / 2 if advised is None else advised, MOST_PATIENCE_S, give_up_at - time.monotonic())
    )


def _first_cause(error: BaseException) -> str:
    """What an error began with: "all attempts failed" says less than why the first of them did."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)  # asyncio's own message has the address in place of this
    return str(error) or type(error).__name__


def _request_id(reply: httpx2.Response, data: object) -> str | None:
    found = reply.headers.get("X-Request-ID")
    if found is None and isinstance(data, dict):
        found = data.get("request_id")
    return None if found is None else str(found)[:100]


def _refusal(base_url: str, reply: httpx2.Response, raw: bytes, call: str) -> ServiceError:
    """The error for a reply that is not a success (RFC 9457 problem details where the service gives them)."""
    try:
        data = parse(raw)
    except InvalidData:
        data = None
    told = data if isinstance(data, dict) else {}
    status, request_id = reply.status_code, _request_id(reply, data)
    said = str(told.get("detail") or told.get("title") or "")[:500]
    message = f"{base_url} answered {call} with {status}" + (f": {said}" if said else "")
    if status >= 500:
        return ServiceFailed(message, status=status, request_id=request_id, retry_after_s=_retry_after(reply.headers))
    if status == 429:
        return RateLimited(message, request_id=request_id, retry_after_s=_retry_after(reply.headers))
    if status == 401:
        message += ". Set REMAT_API_KEY to a key of this service"
    if status in (401, 403):
        return NotAllowed(message, status=status, request_id=request_id)
    if status in (404, 410):
        return NotFound(message, status=status, request_id=request_id)
    if status >= 400:
        pointer = str(told.get("pointer") or "")
        return Refused(message, status=status, pointer=pointer, request_id=request_id)
    return InvalidResponse(f"{message}, which remat does not expect", request_id=request_id)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Retry-After in seconds, from either of its forms (RFC 9110, Section 10.2.3)."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


class AsyncHttp:
    """A service by its base URL, for one event loop.

    Args:
        at_once: connections open at once.
        transport: what carries the requests; tests plug the real application in here, in-process.
        sleep: the clock of the retries.

    Raises:
        InvalidData: the key is none that a header can have.
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
        headers = {"Accept": "application/json", "Accept-Encoding": ACCEPTED_ENCODING, "User-Agent": "remat"}
        key = checked_key(api_key)
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            headers=headers,
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
            given: as for `Call`.

        Raises:
            ServiceError: one of its kinds, with the service's request id where it gave one.
        """
        call = Call(self.base_url, self.timeouts, method, path, **given)
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
        """One request, and what its reply says once the whole body has been read and inflated."""
        timeouts = call.timeouts
        try:
            async with (
                asyncio.timeout(call.seconds()),
                self._client.stream(
                    call.method,
                    call.path,
                    content=call.content,
                    params=call.params,
                    headers=call.headers,
                    timeout=httpx2.Timeout(
                        timeouts.connect, read=timeouts.read + call.wait_s, write=timeouts.write, pool=timeouts.connect
                    ),
                ) as reply,
            ):
                body = Body(reply.headers.get("Content-Encoding", ""))
                async for piece in reply.aiter_bytes():
                    body.add(piece)
        except (httpx2.TransportError, httpx2.DecodingError, Unusable, TimeoutError) as error:
            raise call.failed(error) from None
        raw = body.whole()
        return await asyncio.to_thread(call.read, reply, raw) if len(raw) > MUCH else call.read(reply, raw)


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
    longest = LONGEST_AWAY_PAUSE_S if call.waits_for(error) else LONGEST_PAUSE_S
    jittered = wait_random_exponential(multiplier=FIRST_PAUSE_S, max=longest)(state)
    return jittered + (error.retry_after_s or 0.0)


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
