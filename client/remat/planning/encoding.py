"""Bodies made smaller on the wire, and made large again only up to a bound."""

from __future__ import annotations

import sys

from remat_ir import readable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ACCEPTED = "zstd"
COMPRESS_ABOVE = 8_192
"""Bytes below which a body is sent as it is: the saving would not pay for the header."""

LARGEST_REPLY = 512 * 1024 * 1024
"""Bytes that a reply may inflate to; a plan of 50 million steps does not travel."""


MOST_CONTAINERS, MOST_VALUES = 2_000_000, 8_000_000
"""Arrays and objects, and values of any kind, that a reply may hold: some hundred MB once parsed; a plan has one array
a step."""


class Unusable(ValueError):
    """A body that inflates, or would be parsed, beyond the bound, or in an encoding that was not asked for."""


def compressed(body: bytes) -> tuple[bytes, str | None]:
    """The body to send and its Content-Encoding, None for a small one."""
    if len(body) <= COMPRESS_ABOVE:
        return body, None
    return zstd.compress(body), "zstd"


class Body:
    """The body of a reply, from pieces that have been inflated, of a bounded size each.

    Raises:
        Unusable: it is in an encoding that was not asked for; in `add`, it is too large.
    """

    def __init__(self, encoding: str, most: int = LARGEST_REPLY) -> None:
        if encoding.strip().lower() not in ("", "identity", ACCEPTED):
            raise Unusable(f"unknown content encoding {encoding!r}")
        self._most, self._pieces = most, list[bytes]()
        self._total = self._containers = self._values = 0

    def add(self, piece: bytes) -> None:
        """What comes next; no more than one piece beyond the bound is ever held."""
        self._total += len(piece)
        if self._total > self._most:
            raise Unusable(f"the body is larger than {readable(self._most)}")
        self._containers += piece.count(b"[") + piece.count(b"{")
        self._values += piece.count(b",")
        if self._containers > MOST_CONTAINERS or self._values > MOST_VALUES:
            raise Unusable(f"the body holds more than {MOST_CONTAINERS} arrays or {MOST_VALUES} values")
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """All of it."""
        return b"".join(self._pieces)
