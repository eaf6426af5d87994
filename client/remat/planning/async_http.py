"""The service over HTTP from an event loop: the calls of `http.py`, with the same retries and deadlines."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import httpx2

from ..errors import ServiceError
from . import encoding
from .call import NO_REPLY, RETRIES, Absence, Call, Reply, Timeouts, common_headers


class AsyncHttp:
    """A service by its base URL, for one event loop.

    Args:
        at_once: connections open at once.
        transport: what carries the requests; tests plug the real application in here, in-process.
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
    ) -> None:
        self.base_url = base_url
        self.timeouts = timeouts or Timeouts()
        self.retries = retries
        self._absence = Absence(base_url)
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
        """One logical call, its arguments as those of `Http.call`.

        Raises:
            ServiceError: one of its kinds, with the service's request id where it gave one.
        """
        call = Call.of(self.base_url, self.timeouts, method, path, **given)
        for attempt in itertools.count():
            try:
                reply = await self._once(call)
            except ServiceError as error:
                pause = call.pause(error, attempt, random.random(), self.retries)
                if pause is None:
                    raise
                self._absence.note(error, call, attempt)
            else:
                self._absence.over()
                return reply
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: an attempt returns or raises")

    async def _once(self, call: Call) -> Reply:
        limits, seconds = call.limits()
        try:
            async with asyncio.timeout(seconds):
                raw, reply = await self._exchange(call, limits)
        except NO_REPLY as error:
            raise call.failed(error, late=False) from None
        return call.read(reply, raw)

    async def _exchange(self, call: Call, limits: httpx2.Timeout) -> tuple[bytes, httpx2.Response]:
        """One request and its reply's whole body, inflated off the loop."""
        async with self._client.stream(
            call.method,
            call.path,
            content=call.content,
            params=dict(call.params),
            headers=dict(call.headers),
            timeout=limits,
        ) as reply:
            chunks: list[bytes] = []
            total = 0
            async for chunk in reply.aiter_raw():
                total += len(chunk)
                if total > encoding.LARGEST_REPLY:
                    raise encoding.TooLarge(f"the body is larger than {encoding.LARGEST_REPLY} bytes")
                chunks.append(chunk)
            how = reply.headers.get("Content-Encoding", "")
        return await asyncio.to_thread(encoding.inflated, chunks, how), reply
