"""Bodies made smaller on the wire, and made large again only up to a bound."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ACCEPTED = "zstd, gzip"
COMPRESS_ABOVE = 8_192
"""Bytes below which a body is sent as it is: the saving would not pay for the header."""

LARGEST_REPLY = 512 * 1024 * 1024
"""Bytes that a reply may inflate to; a plan of 50 million steps does not travel."""


MOST_CONTAINERS, MOST_VALUES = 2_000_000, 8_000_000
"""Arrays and objects, and values of any kind, that a reply may hold: some hundred MB once parsed; a plan has one array
a step."""


class TooLarge(ValueError):
    """A body that inflates, or would be parsed, beyond the bound."""


class Garbled(ValueError):
    """A body that does not inflate, or ends too soon."""


def compressed(body: bytes) -> tuple[bytes, str | None]:
    """The body to send and its Content-Encoding, None for a small one."""
    if len(body) <= COMPRESS_ABOVE:
        return body, None
    return zstd.compress(body), "zstd"


def inflated(chunks: Iterable[bytes], encoding: str, most: int = LARGEST_REPLY) -> bytes:
    """The whole body from the wire's chunks.

    Raises:
        TooLarge: it would exceed `most` bytes; no more than one chunk beyond them is ever held.
        Garbled: an unknown encoding, data that does not inflate, a stream that is cut off or has a tail.
    """
    out: list[bytes] = []
    total = containers = values = 0
    for piece in _pieces(chunks, encoding.strip().lower()):
        total += len(piece)
        if total > most:
            raise TooLarge(f"the body is larger than {most} bytes")
        containers += piece.count(b"[") + piece.count(b"{")
        values += piece.count(b",")
        if containers > MOST_CONTAINERS or values > MOST_VALUES:
            raise TooLarge(f"the body holds more than {MOST_CONTAINERS} arrays or {MOST_VALUES} values")
        out.append(piece)
    return b"".join(out)


def _pieces(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    if encoding in ("", "identity"):
        yield from chunks
        return
    step = 1 << 20
    if encoding in ("gzip", "x-gzip"):
        yield from _gunzip(chunks, step)
    elif encoding == "zstd":
        yield from _unzstd(chunks, step)
    else:
        raise Garbled(f"unknown content encoding {encoding!r}")


def _gunzip(chunks: Iterable[bytes], step: int) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    try:
        for chunk in chunks:
            data = chunk
            while data:
                if decoder.eof:
                    raise Garbled("data after the end of the gzip stream")
                yield decoder.decompress(data, step)
                data = decoder.unconsumed_tail or decoder.unused_data
    except zlib.error as error:
        raise Garbled(f"not gzip: {error}") from None
    if not decoder.eof:
        raise Garbled("the gzip stream is cut off")


def _unzstd(chunks: Iterable[bytes], step: int) -> Iterator[bytes]:
    decoder: Any = zstd.ZstdDecompressor()
    try:
        for chunk in chunks:
            if decoder.eof and chunk:
                raise Garbled("data after the end of the zstd frame")
            yield decoder.decompress(chunk, step)
            while not decoder.eof and not decoder.needs_input:
                yield decoder.decompress(b"", step)
            if decoder.unused_data:
                raise Garbled("data after the end of the zstd frame")
    except zstd.ZstdError as error:
        raise Garbled(f"not zstd: {error}") from None
    if not decoder.eof:
        raise Garbled("the zstd frame is cut off")
