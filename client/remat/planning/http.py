"""One HTTP call to the service, made as often as it takes and no more.

Two retries from half a second with full jitter, on 408, 409, 429, 5xx and connection errors; Retry-After is honoured;
one idempotency key per logical call, the same on every retry; replies are read up to a bound.
"""

from __future__ import annotations

import json
import random
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx2

from remat_ir import InvalidData
from remat_ir.read import parse

from ..errors import BadAnswer, NotAllowed, NotThere, Refused, ServiceError, ServiceFailed, TooMany, Unreachable
from . import encoding
from .line import Line, Lines

RETRIED = frozenset({408, 409, 429})
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
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


class Http:
    """A service by its base URL.

    Args:
        transport: what carries the requests; tests plug the real application in here, in-process.
        sleep, jitter: the clock and the dice of the retries, `jitter()` in [0, 1).
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: int = 2,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.base_url = base_url
        self.timeouts = timeouts or Timeouts()
        self.retries = retries
        self._sleep, self._jitter = sleep, jitter
        headers = {"Accept": "application/json", "Accept-Encoding": encoding.ACCEPTED, "User-Agent": "remat"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._lines = Lines(
            lambda: httpx2.Client(
                base_url=base_url,
                headers=headers,
                transport=transport,
                follow_redirects=False,
                trust_env=transport is None,
            )
        )
        weakref.finalize(self, self._lines.close)

    def __repr__(self) -> str:
        return f"Http({self.base_url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._lines.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        give_up_at: float = float("inf"),
    ) -> Reply:
        """One logical call.

        Args:
            body: a JSON value to send.
            wait_s: seconds that the service was asked to hold the reply.
            give_up_at: the moment of `time.monotonic()` after which no retry starts.

        Raises:
            ServiceError: one of its kinds, with the service's request id where it gave one.
        """
        sent = dict(headers or {})
        content: bytes | None = None
        if method == "POST":
            sent["Idempotency-Key"] = uuid.uuid4().hex
            content = json.dumps({} if body is None else body, separators=(",", ":")).encode()
            sent["Content-Type"] = "application/json"
            content, how = encoding.compressed(content)
            if how is not None:
                sent["Content-Encoding"] = how
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, path, content, params, sent, wait_s, give_up_at)
            except ServiceError as error:
                pause = self._pause(error, attempt)
                if pause is None or attempt == self.retries or time.monotonic() + pause > give_up_at:
                    raise
            self._sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause(self, error: ServiceError, attempt: int) -> float | None:
        """Seconds to wait before the next attempt, or None where another could not help."""
        advised: float | None = None
        if isinstance(error, (TooMany, ServiceFailed)):
            advised = error.retry_after_s
            if advised is not None and advised > MOST_PATIENCE_S:
                return None
        elif isinstance(error, Refused):
            if error.status not in RETRIED:
                return None
        elif isinstance(error, BadAnswer):
            return None
        jittered = self._jitter() * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt)
        # the advice is a floor; the jitter above it keeps many ranks from coming back in one instant
        return jittered if advised is None else advised + jittered

    def _once(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
        wait_s: float,
        give_up_at: float,
    ) -> Reply:
        left = max(0.05, give_up_at - time.monotonic())
        limits = httpx2.Timeout(
            connect=min(self.timeouts.connect, left),
            read=min(self.timeouts.read + wait_s, left),
            write=min(self.timeouts.write, left),
            pool=min(self.timeouts.connect, left),
        )
        until = time.monotonic() + min(left, self.timeouts.write + self.timeouts.read + wait_s)
        late = f"{self.base_url} did not answer {method} {path} in time"
        try:
            with self._lines.until(until) as line:
                raw, reply = _exchange(line, method, path, content, params, headers, limits)
        except httpx2.TimeoutException:
            raise Unreachable(late) from None
        except (encoding.TooLarge, encoding.Garbled) as error:
            raise BadAnswer(f"{self.base_url} answered {method} {path} with a body of no use: {error}") from None
        except httpx2.DecodingError as error:
            raise BadAnswer(f"{self.base_url} answered {method} {path} with a body of no use: {error}") from None
        except httpx2.TransportError as error:
            if line.cut:
                raise Unreachable(late) from None
            what = str(error) or type(error).__name__
            raise Unreachable(f"{self.base_url} could not be reached for {method} {path}: {what}") from None
        if 200 <= reply.status_code < 300:
            return Reply(reply.status_code, reply.headers, self._json(raw, reply, f"{method} {path}"))
        raise _refusal(self.base_url, reply, raw, f"{method} {path}")

    def _json(self, raw: bytes, reply: httpx2.Response, call: str) -> Any:
        if not raw:
            return None
        try:
            return parse(raw)
        except InvalidData as error:
            raise BadAnswer(
                f"{self.base_url} answered {call} with nonsense: {error}", request_id=_request_id(reply, None)
            ) from None


def _exchange(
    line: Line,
    method: str,
    path: str,
    content: bytes | None,
    params: Mapping[str, str] | None,
    headers: Mapping[str, str],
    limits: httpx2.Timeout,
) -> tuple[bytes, httpx2.Response]:
    """One request and its reply's whole body, inflated."""
    with line.client.stream(
        method,
        path,
        content=content,
        params=dict(params or {}),
        headers=dict(headers),
        timeout=limits,
        extensions={"trace": line.trace},
    ) as reply:
        return encoding.inflated(reply.iter_raw(), reply.headers.get("Content-Encoding", "")), reply


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
    status, request_id = reply.status_code, _request_id(reply, data)
    said = ""
    if isinstance(data, dict):
        said = str(data.get("detail") or data.get("title") or "")[:500]
    message = f"{base_url} answered {call} with {status}" + (f": {said}" if said else "")
    pointer = str(data.get("pointer") or "") if isinstance(data, dict) else ""
    if status >= 500:
        return ServiceFailed(message, request_id=request_id, retry_after_s=_retry_after(reply))
    if status == 429:
        return TooMany(message, request_id=request_id, retry_after_s=_retry_after(reply))
    if status in (401, 403):
        return NotAllowed(message, status=status, request_id=request_id)
    if status in (404, 410):
        return NotThere(message, status=status, request_id=request_id)
    if status >= 400:
        return Refused(message, status=status, pointer=pointer, request_id=request_id)
    return BadAnswer(f"{message}, which remat does not expect", request_id=request_id)


def _retry_after(reply: httpx2.Response) -> float | None:
    """Retry-After in seconds, from either of its forms (RFC 9110, Section 10.2.3)."""
    text = reply.headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
