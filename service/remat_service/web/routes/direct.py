"""Routes that are asked most, without FastAPI's reading of their parameters: that takes as long as a hit does.

A route's direct way calls the same function as the usual one, with the same caller, and leaves to the usual one what
it does not read itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

Way = Callable[[Request], Awaitable[Response | None]]
"""Answers a request; None leaves it to the usual way."""

_WAYS: dict[Callable[..., Any], Way] = {}


def directly(endpoint: Callable[..., Any]) -> Callable[[Way], Way]:
    """Declares the direct way of the route of an endpoint."""

    def declare(way: Way) -> Way:
        _WAYS[endpoint] = way
        return way

    return declare


class DirectRoute(APIRoute):
    """A route that goes its direct way, where it has one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The direct way, then the usual one."""
        usual, endpoint = super().get_route_handler(), self.endpoint

        async def handler(request: Request) -> Response:
            way = _WAYS.get(endpoint)
            response = None if way is None else await way(request)
            return await usual(request) if response is None else response

        return handler
