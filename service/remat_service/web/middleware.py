"""What happens around every request: an id, a host check, a log line, a measurement; and errors on the wire.

Errors are `application/problem+json` (RFC 9457), with a JSON pointer where the body is to blame.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import structlog
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter, Histogram
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remat_ir import InvalidData, InvalidPlan

from ..clock import SYSTEM
from ..errors import BadRequest, Invalid, NotFound, ServiceError, Unauthorized, Unavailable, WrongMethod, kind_of
from ..storage.database import what_fails
from ..telemetry import Metrics
from .authentication import ADMITTED

log = structlog.get_logger("remat_service.web")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
_QUIET = frozenset(("/livez", "/readyz", "/metrics"))


class RequestMiddleware:
    """The outermost layer; `hosts` are the Host names to accept, empty for any."""

    def __init__(self, app: ASGIApp, metrics: Metrics, hosts: frozenset[str]) -> None:
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

        async def reading() -> Message:
            return {"type": "http.disconnect"} if answered else await receive()

        async def noting(message: Message) -> None:
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
            elif "\x00" in scope["path"] or b"%00" in scope["query_string"]:  # SQLite would take it, PostgreSQL not
                await problem_response(Invalid("the address holds a NUL"))(scope, receive, noting)
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
        key = route, method if method in _METHODS else "other", status  # a client may make methods up without end
        if key not in self._meters:  # once: to look a metric up by its labels takes longer than to count
            count = self._metrics.requests.labels(*key[:2], str(status))
            self._meters[key] = count, self._metrics.request_seconds.labels(route)
        count, durations = self._meters[key]
        count.inc()
        durations.observe(seconds)
        if scope["path"] not in _QUIET:
            log.info("request", method=method, path=scope["path"], status=status, seconds=round(seconds, 4))


def host_name(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def problem_response(error: Exception) -> Response:
    """The response to an error, a problem object; nothing of the service's insides is in it."""
    kind = kind_of(error)
    data: dict[str, Any] = {"type": f"urn:remat:problem:{kind.slug}", "title": kind.title, "status": kind.status}
    foreseen = isinstance(error, (ServiceError, InvalidData, InvalidPlan))
    data["detail"] = str(error) if foreseen else "The service failed; its log has the story under this request's id."
    pointer = error.pointer if isinstance(error, (ServiceError, InvalidData)) else None
    if pointer is not None:
        data["pointer"] = pointer
    if isinstance(error, Unauthorized) and error.issuer:
        data["issuer"] = error.issuer
    headers = {}
    if isinstance(error, ServiceError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if kind.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps(data), kind.status, headers, "application/problem+json")


FOREIGN = (OperationalError, PoolTimeout, RequestValidationError, HTTPException)
"""What the libraries raise that a caller is to know."""


def own(error: Exception) -> Exception:
    """An error of a library as one of ours: the database in trouble, a parameter, what the router refuses."""
    if isinstance(error, (OperationalError, PoolTimeout)):
        return Unavailable(what_fails(error), retry_after_s=2)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return Invalid(f"{' '.join(str(part) for part in first['loc'])}: {first['msg']}")
    if not isinstance(error, HTTPException):
        return error
    if error.status_code == 404:
        return NotFound("there is no such route")
    if error.status_code == 405:
        return WrongMethod("this route takes other methods; see the header Allow")
    return BadRequest(str(error.detail))
