"""The service over blocking HTTP: one logical call, made as often as it takes and no more."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from ..errors import ServiceError
from . import encoding
from .call import NO_REPLY, RETRIES, Absence, Call, Reply, Timeouts, common_headers
from .line import Line, Lines


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
        retries: int = RETRIES,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.base_url = base_url
        self.timeouts = timeouts or Timeouts()
        self.retries = retries
        self._absence = Absence(base_url)
        self._sleep, self._jitter = sleep, jitter
        self._lines = Lines(
            lambda: httpx2.Client(
                base_url=base_url,
                headers=common_headers(api_key),
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
        wait_until: float = 0.0,
    ) -> Reply:
        """One logical call.

        Args:
            body: a JSON value to send.
            wait_s: seconds that the service was asked to hold the reply.
            give_up_at: the moment of `time.monotonic()` after which no retry starts.
            wait_until: the moment up to which a service that is away is waited for, beyond the usual retries.

        Raises:
            ServiceError: one of its kinds, with the service's request id where it gave one.
        """
        call = Call.of(
            self.base_url, self.timeouts, method, path,
            body=body, params=params, headers=headers, wait_s=wait_s, give_up_at=give_up_at, wait_until=wait_until,
        )  # fmt: skip
        for attempt in itertools.count():
            try:
                reply = self._once(call)
            except ServiceError as error:
                pause = call.pause(error, attempt, self._jitter(), self.retries)
                if pause is None:
                    raise
                self._absence.note(error, call, attempt)
            else:
                self._absence.over()
                return reply
            self._sleep(pause)
        raise AssertionError("unreachable: an attempt returns or raises")

    def _once(self, call: Call) -> Reply:
        limits, seconds = call.limits()
        with self._lines.until(time.monotonic() + seconds) as line:
            try:
                raw, reply = _exchange(line, call, limits)
            except NO_REPLY as error:
                raise call.failed(error, line.cut) from None
        return call.read(reply, raw)


def _exchange(line: Line, call: Call, limits: httpx2.Timeout) -> tuple[bytes, httpx2.Response]:
    """One request and its reply's whole body, inflated."""
    with line.client.stream(
        call.method,
        call.path,
        content=call.content,
        params=dict(call.params),
        headers=dict(call.headers),
        timeout=limits,
        extensions={"trace": line.trace},
    ) as reply:
        return encoding.inflated(reply.iter_raw(), reply.headers.get("Content-Encoding", "")), reply
