"""Bodies, read by a route once it knows its caller: in time, a piece at a time, within one budget for all requests.

A piece of an encoded body is inflated and measured (`inflate.py`, `measure.py`) before the next one is asked for, so
that it is refused at the first piece that takes it over a limit, and nothing is built from it. A body that is sent as
it is can't be larger than what was sent: it is measured before it is parsed, or never where its answer is at hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect

from remat_ir import readable

from ..errors import BadRequest, TooLarge, TooSlow, Unavailable, Unsupported
from ..requests.parse import Body
from ..requests.profiles import MOST_ROWS
from ..settings import Settings
from .inflate import STEP_BYTES, Inflater
from .measure import JsonLimits, Measure

_TEXT_COPIES = 2  # the bytes, and the text that they are decoded to


class MemoryBudget:
    """Bytes that bodies under way may take together, what is built from them included."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used = most_bytes, 0
        self.lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """A body's share, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            share.close()


class Share:
    """What one body holds of the budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._held, self._open = budget, 0, True

    def close(self) -> None:
        """Give everything back; a thread that is still at work holds no more from here on."""
        self.hold(0)
        self._open = False

    def hold(self, size: int) -> None:
        """Hold so much in place of what was held.

        Raises:
            Unavailable: other bodies take the rest.
            TooLarge: it is more than there is for all.
        """
        if size > self._budget.most_bytes:
            raise TooLarge("the body would take more memory than the service has for requests")
        with self._budget.lock:
            if not self._open:
                return
            if size > self._held and self._budget.used - self._held + size > self._budget.most_bytes:
                raise Unavailable("many large requests are being read; ask again in a moment", retry_after_s=1)
            self._budget.used += size - self._held
            self._held = size


class Bodies:
    """Reads the bodies of one application."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limits = JsonLimits.of(settings, MOST_ROWS)
        self._budget = MemoryBudget(settings.most_bodies_bytes)

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[Body]:
        """The plain JSON text of a request's body; its memory counts up to the end of the block.

        Raises:
            TooLarge, Unsupported, BadRequest, TooSlow, Unavailable: refused, with the rest of the body unread.
        """
        with self._budget.share() as share:
            try:
                async with asyncio.timeout(self._settings.body_timeout_s):
                    body = await self._read(request, share)
            except TimeoutError:
                seconds = self._settings.body_timeout_s
                raise TooSlow(f"the body did not come within {seconds:g} s") from None
            except ClientDisconnect:
                raise BadRequest("the body was not sent to its end") from None
            yield body

    async def _read(self, request: Request, share: Share) -> Body:
        most_wire = self._settings.most_wire_bytes
        said = f"the body is larger than the {readable(most_wire)} allowed on the wire"
        length = request.headers.get("content-length")
        if length is not None and (not length.isascii() or not length.isdigit() or int(length) > most_wire):
            raise TooLarge(said)
        arriving = _Arriving(self._settings, self._limits, request.headers.getlist("content-encoding"), share)
        wire = 0
        async for piece in request.stream():
            if not piece:
                continue
            if not wire:
                _check_type(request.headers.getlist("content-type"))
            wire += len(piece)
            if wire > most_wire:
                raise TooLarge(said)
            await arriving.take(piece)
        return arriving.finish()


async def no_body(request: Request) -> None:
    """Read a body where none is needed: one that a form in a browser could send is refused.

    Raises:
        ServiceError: as `Bodies.of`.
    """
    bodies: Bodies = request.app.state.bodies
    async with bodies.of(request):
        pass


class _Arriving:
    """One body on its way in."""

    def __init__(self, settings: Settings, limits: JsonLimits, encodings: list[str], share: Share) -> None:
        self._inflater = Inflater([value.encode("latin-1") for value in encodings], settings.most_body_bytes)
        self._measure = Measure(limits)
        self._share = share
        self._plain = bytearray()
        self._hash = hashlib.sha256()
        self._measured = 0

    async def take(self, piece: bytes) -> None:
        """Take a piece; one that is inflated and measured, off the event loop."""
        if self._inflater.name == "identity":
            self._add(piece)
        else:
            await asyncio.to_thread(self._add, piece)

    def _add(self, piece: bytes) -> None:
        for plain in self._inflater.feed(piece):
            self._plain += plain
            self._hash.update(plain)  # while the next piece is on its way
            self._hold()
            if self._inflater.name != "identity":
                self._look()

    def _look(self) -> None:
        """Measure what has come."""
        if len(self._plain) <= STEP_BYTES:  # what is smaller can't become large
            return
        while self._measured < len(self._plain):
            end = min(self._measured + STEP_BYTES, len(self._plain))
            self._measure.feed(bytes(memoryview(self._plain)[self._measured : end]))
            self._measured = end
            self._hold()

    def _hold(self) -> None:
        self._share.hold(_TEXT_COPIES * len(self._plain) + self._measure.built_bytes)

    def finish(self) -> Body:
        """The whole body."""
        self._inflater.finish()
        return Body(self._plain, self._look, self._hash.digest())


def _check_type(values: list[str]) -> None:
    kind = values[0].lower() if len(values) == 1 else ""
    name, _, parameters = kind.partition(";")
    if name.strip() != "application/json" or parameters.strip() not in ("", "charset=utf-8"):
        raise Unsupported("the body must be application/json")
