"""Bodies, read by a route once it knows its caller: in time, a piece at a time, within one budget for all requests.

A piece of an encoded body is inflated (`Inflater`: no step makes more than `STEP_BYTES`) before the next one is asked
for, so that it is refused at the first piece that takes it over the limit. What its JSON would become is estimated
before it is parsed (`requests/parse.py`), or never where its answer is at hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from remat_ir import readable
from remat_ir.document import Document

from ..errors import BadRequest, TooLarge, TooSlow, Unavailable, Unsupported
from ..requests.parse import Body, from_body
from ..settings import Settings

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

T = TypeVar("T")

STEP_BYTES = 65_536
_WINDOW_LOG = 23  # 8 MiB: what level 19 uses; a frame may ask its reader for far more

_TEXT_COPIES = 2  # the bytes, and the text that they are decoded to


class Inflater:
    """One body's encoding: none, gzip or zstd.

    Raises:
        Unsupported: another encoding, or more than one.
    """

    def __init__(self, encodings: Sequence[str], most_bytes: int) -> None:
        names = [name.strip().lower() for value in encodings for name in value.split(",")]
        if len(names) > 1 or (names and names[0] not in ("identity", "gzip", "zstd")):
            raise Unsupported("Content-Encoding must be gzip or zstd, once")
        self.name = names[0] if names else "identity"
        self._most, self._made = most_bytes, 0
        self._decoder: Any = None
        if self.name == "gzip":
            self._decoder = zlib.decompressobj(wbits=31)
        elif self.name == "zstd":
            self._decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    def feed(self, wire: bytes) -> Iterator[bytes]:
        """The plain bytes of the next piece of the wire.

        Raises:
            TooLarge: more than `most_bytes` in all.
            BadRequest: damaged, or followed by something else.
        """
        for start in range(0, len(wire), STEP_BYTES):
            yield from self._inflated(wire[start : start + STEP_BYTES])

    def _inflated(self, wire: bytes) -> Iterator[bytes]:
        if self._decoder is None:
            yield self._counted(wire)
            return
        plain = b"more"
        while wire or plain:
            if wire and self._decoder.eof:
                raise BadRequest(f"the body's {self.name} data is followed by something else")
            try:
                plain = b"" if self._decoder.eof else self._decoder.decompress(wire, STEP_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise BadRequest(f"the body is not {self.name}: {error}") from None
            wire = self._decoder.unconsumed_tail if self.name == "gzip" else b""
            if self._decoder.unused_data:
                raise BadRequest(f"the body's {self.name} data is followed by something else")
            if plain:
                yield self._counted(plain)

    def _counted(self, plain: bytes) -> bytes:
        self._made += len(plain)
        if self._made > self._most:
            raise TooLarge(f"the body is larger than the {readable(self._most)} allowed")
        return plain

    def finish(self) -> None:
        """The wire has ended.

        Raises:
            BadRequest: the data has not.
        """
        if self._decoder is not None and not self._decoder.eof:
            raise BadRequest(f"the body's {self.name} data is truncated")


class MemoryBudget:
    """Bytes that bodies under way may take together, what is built from them included."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._used = most_bytes, 0
        self._lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Lets one body hold so many bytes in place of what it held, up to the end of the block.

        Who calls it: a thread that is still at work afterwards holds nothing any more.

        Raises:
            Unavailable: other bodies take the rest.
            TooLarge: it is more than there is for all.
        """
        held, ended = 0, False

        def hold(size: int) -> None:
            nonlocal held
            if size > self._most:
                raise TooLarge("the body would take more memory than the service has for requests")
            with self._lock:
                if ended:
                    return
                if size > held and self._used - held + size > self._most:
                    raise Unavailable("many large requests are being read; ask again in a moment", retry_after_s=1)
                self._used += size - held
                held = size

        try:
            yield hold
        finally:
            with self._lock:
                self._used -= held
                ended = True


@asynccontextmanager
async def body_of(request: Request) -> AsyncIterator[Body]:
    """The plain JSON text of a request's body; its memory counts up to the end of the block.

    Raises:
        TooLarge, Unsupported, BadRequest, TooSlow, Unavailable: refused, with the rest of the body unread.
    """
    settings: Settings = request.app.state.context.settings
    budget: MemoryBudget = request.app.state.bodies
    with budget.share() as hold:
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                body = await _read(request, settings, hold)
        except TimeoutError:
            raise TooSlow(f"the body did not come within {settings.body_timeout_s:g} s") from None
        except ClientDisconnect:
            raise BadRequest("the body was not sent to its end") from None
        yield body


async def _read(request: Request, settings: Settings, hold: Callable[[int], None]) -> Body:
    most_wire = settings.most_wire_bytes
    said = f"the body is larger than the {readable(most_wire)} allowed on the wire"
    length = request.headers.get("content-length")
    if length is not None and (not length.isascii() or not length.isdigit() or int(length) > most_wire):
        raise TooLarge(said)
    inflater = Inflater(request.headers.getlist("content-encoding"), settings.most_body_bytes)
    plain, digest, wire = bytearray(), hashlib.sha256(), 0

    def take(piece: bytes) -> None:
        for some in inflater.feed(piece):
            plain.extend(some)
            digest.update(some)  # while the next piece is on its way
            hold(_TEXT_COPIES * len(plain))

    async for piece in request.stream():
        if not piece:
            continue
        if not wire:
            _check_type(request.headers.getlist("content-type"))
        wire += len(piece)
        if wire > most_wire:
            raise TooLarge(said)
        if inflater.name == "identity":
            take(piece)
        else:
            await asyncio.to_thread(take, piece)
    inflater.finish()
    return Body(plain, lambda built: hold(_TEXT_COPIES * len(plain) + built), digest.digest())


async def read_body(request: Request, read: Callable[[Any, Settings], T]) -> T:
    """What a reader makes of a request's body, for routes that need no more of it afterwards.

    Raises:
        ServiceError: as `body_of` and `from_body`.
    """
    async with body_of(request) as sent:
        return await from_body(sent, read, request.app.state.context.settings)


async def read_document(request: Request, document: Document) -> dict[str, Any]:
    """A request's body as a document, for routes that need no more of it afterwards.

    Raises:
        ServiceError: as `body_of` and `from_body`.
        InvalidData: malformed; the pointer leads to the place.
    """
    return await read_body(request, lambda data, _: document.read(data))


async def no_body(request: Request) -> None:
    """Read a body where none is needed: one that a form in a browser could send is refused.

    Raises:
        ServiceError: as `body_of`.
    """
    async with body_of(request):
        pass


def _check_type(values: list[str]) -> None:
    kind = values[0].lower() if len(values) == 1 else ""
    name, _, parameters = kind.partition(";")
    if name.strip() != "application/json" or parameters.strip() not in ("", "charset=utf-8"):
        raise Unsupported("the body must be application/json")
