"""What happens around every request: an id, a host check, a log line, a measurement."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog
from prometheus_client import Counter, Histogram

from ..clock import SYSTEM
from ..errors import BadRequest
from ..metrics import Metrics
from .authentication import ADMITTED
from .problems import problem_response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = structlog.get_logger("remat_service.web")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
_QUIET = frozenset(("/livez", "/readyz", "/metrics"))


class RequestMiddleware:
    """The outermost layer; `hosts` are the Host names to accept, empty for any."""

    def __init__(self, app: App, metrics: Metrics, hosts: frozenset[str]) -> None:
        self._app, self._metrics, self._hosts = app, metrics, hosts
        self._meters: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        if head:  # a GET without its body, for every route
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else SYSTEM.new_id()
        status, answered = 500, False
        begun = time.perf_counter()

        async def reading() -> MutableMapping[str, Any]:
            return {"type": "http.disconnect"} if answered else await receive()

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status, answered
            if head and message["type"] == "http.response.body":
                if message.get("more_body", False):  # a stream: its end is not waited for
                    return
                message = {**message, "body": b""}
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=request_id)
        try:
            if self._hosts and host_name(headers.get(b"host", b"").decode("latin-1")) not in self._hosts:
                error = BadRequest("the Host header names another host; see REMAT_ALLOWED_HOSTS")
                await problem_response(error)(scope, receive, noting)
            else:
                await self._app(scope, reading if head else receive, noting)
        except Exception as error:
            log.exception("request failed", path=scope["path"])
            if status == 500:
                await problem_response(error)(scope, receive, noting)
        finally:
            for leave in scope.pop(ADMITTED, ()):
                leave()
            self._note(scope, "HEAD" if head else scope["method"], status, time.perf_counter() - begun)
            structlog.contextvars.clear_contextvars()

    def _note(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        count, durations = self._meter(route, method, status)
        count.inc()
        durations.observe(seconds)
        if scope["path"] not in _QUIET:
            log.info("request", method=method, path=scope["path"], status=status, seconds=round(seconds, 4))

    def _meter(self, route: str, method: str, status: int) -> tuple[Counter, Histogram]:
        """The metrics of a route: looked up by their labels once, which takes longer than counting."""
        key = route, method if method in _METHODS else "other", status  # a client may make methods up without end
        found = self._meters.get(key)
        if found is None:
            count = self._metrics.requests.labels(*key[:2], str(status))
            self._meters[key] = found = count, self._metrics.request_seconds.labels(route)
        return found


def host_name(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
