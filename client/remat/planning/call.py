"""One logical call to the service: what is sent, how long each attempt may take, what a reply means, when to try again.

Two retries from half a second with full jitter, on 408, 409, 429, 5xx and connection errors; Retry-After is honoured;
one idempotency key per logical call, the same on every retry; replies are read up to a bound. A service that is away,
or whose database is, is waited for until a moment that the caller names: a restart costs nobody an answer.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx2

from remat_ir import InvalidData
from remat_ir.schema import parse

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
from . import encoding

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


def common_headers(api_key: str | None) -> dict[str, str]:
    """What every request carries."""
    headers = {"Accept": "application/json", "Accept-Encoding": encoding.ACCEPTED, "User-Agent": "remat"}
    return headers if api_key is None else {**headers, "Authorization": f"Bearer {api_key}"}


@dataclass(frozen=True)
class Call:
    """One logical call, whoever carries it.

    Attributes:
        wait_s: seconds that the service was asked to hold the reply.
        give_up_at: the moment of `time.monotonic()` after which no attempt starts, and none goes on.
        wait_until: the moment up to which a service that is away is waited for, beyond the usual retries.
    """

    base_url: str
    timeouts: Timeouts
    method: str
    path: str
    content: bytes | None
    params: Mapping[str, str]
    headers: Mapping[str, str]
    wait_s: float
    give_up_at: float
    wait_until: float = 0.0

    @staticmethod
    def of(
        base_url: str,
        timeouts: Timeouts,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        give_up_at: float = float("inf"),
        wait_until: float = 0.0,
    ) -> Call:
        """A call that sends a JSON value, or nothing where it is not a POST."""
        sent = dict(headers or {})
        content: bytes | None = None
        if method == "POST":
            sent["Idempotency-Key"] = uuid.uuid4().hex
            content = json.dumps({} if body is None else body, separators=(",", ":")).encode()
            sent["Content-Type"] = "application/json"
            content, how = encoding.compressed(content)
            if how is not None:
                sent["Content-Encoding"] = how
        return Call(base_url, timeouts, method, path, content, dict(params or {}), sent, wait_s, give_up_at, wait_until)

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
        if isinstance(error, (encoding.Unusable, httpx2.DecodingError)):
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

    def longest_pause_s(self, error: ServiceError) -> float:
        """The most that is added to what the service advises before the next attempt."""
        return LONGEST_AWAY_PAUSE_S if self.waits_for(error) else LONGEST_PAUSE_S

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


NO_REPLY = (httpx2.TransportError, httpx2.DecodingError, encoding.Unusable, TimeoutError)
"""What an attempt without a reply raises."""


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
    status, request_id = reply.status_code, _request_id(reply, data)
    said = ""
    if isinstance(data, dict):
        said = str(data.get("detail") or data.get("title") or "")[:500]
    message = f"{base_url} answered {call} with {status}" + (f": {said}" if said else "")
    pointer = str(data.get("pointer") or "") if isinstance(data, dict) else ""
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
        return Refused(message, status=status, pointer=pointer, request_id=request_id)
    return InvalidResponse(f"{message}, which remat does not expect", request_id=request_id)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Retry-After in seconds, from either of its forms (RFC 9110, Section 10.2.3)."""
    text = headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
