"""Bodies before anybody reads them: limited on the wire and inflated, one encoding, JSON only."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..errors import BadRequest, ServiceError, TooLarge, Unsupported
from .problems import problem_response

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))


class BodyLimits:
    """Reads the whole body of a request, inflates it within a hard cap, and hands the plain bytes on."""

    def __init__(self, app: App, most_wire_bytes: int, most_body_bytes: int) -> None:
        self._app, self._most_wire, self._most_body = app, most_wire_bytes, most_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ServiceError as error:
            await problem_response(error)(scope, receive, send)
            return
        if body is None:
            return
        headers = [
            (key, value) for key, value in scope["headers"] if key not in (b"content-encoding", b"content-length")
        ]
        headers.append((b"content-length", str(len(body)).encode()))
        sent = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app({**scope, "headers": headers}, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        headers: dict[bytes, list[bytes]] = {}
        for key, value in scope["headers"]:
            headers.setdefault(key, []).append(value)
        length = headers.get(b"content-length")
        if length is not None and (not length[0].isdigit() or int(length[0]) > self._most_wire):
            raise TooLarge(f"the body is larger than the {self._most_wire} bytes allowed on the wire")
        wire = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            wire += message.get("body", b"")
            if len(wire) > self._most_wire:
                raise TooLarge(f"the body is larger than the {self._most_wire} bytes allowed on the wire")
            if not message.get("more_body", False):
                break
        if wire:
            _check_type(headers.get(b"content-type", []))
        return inflate(bytes(wire), headers.get(b"content-encoding", []), self._most_body)


def _check_type(values: list[bytes]) -> None:
    kind = values[0].decode("latin-1").lower() if len(values) == 1 else ""
    name, _, parameters = kind.partition(";")
    if name.strip() != "application/json" or parameters.strip() not in ("", "charset=utf-8"):
        raise Unsupported("the body must be application/json")


def inflate(wire: bytes, encodings: list[bytes], most_bytes: int) -> bytes:
    """The plain body: as it is, or inflated from gzip or zstd to at most `most_bytes`.

    Raises:
        TooLarge: it would inflate to more.
        Unsupported: another encoding, or more than one.
        BadRequest: damaged, truncated, or followed by something else.
    """
    names = [name.strip().lower() for value in encodings for name in value.decode("latin-1").split(",")]
    if not names or names == ["identity"]:
        if len(wire) > most_bytes:
            raise TooLarge(f"the body is larger than the {most_bytes} bytes allowed")
        return wire
    if len(names) > 1 or names[0] not in ("gzip", "zstd"):
        raise Unsupported("Content-Encoding must be gzip or zstd, once")
    name = names[0]
    inflater: Any = zlib.decompressobj(wbits=31) if name == "gzip" else zstd.ZstdDecompressor()
    try:
        body: bytes = inflater.decompress(wire, most_bytes + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise BadRequest(f"the body is not {name}: {error}") from None
    if len(body) > most_bytes:
        raise TooLarge(f"the body inflates to more than the {most_bytes} bytes allowed")
    if not inflater.eof:
        raise BadRequest(f"the body's {name} data is truncated")
    if inflater.unused_data:
        raise BadRequest(f"the body's {name} data is followed by something else")
    return body
