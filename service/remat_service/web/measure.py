"""What a JSON text would become, counted a piece at a time before anything is built from it."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..errors import BadRequest, TooLarge
from ..settings import Settings

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string, or the beginning of one up to the end of the piece: it matches at every opening quote, in linear time."""
_NOT_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


@dataclass(frozen=True)
class JsonLimits:
    """The most that any body of the service may hold.

    Attributes:
        depth: arrays and objects inside one another.
        objects, arrays, members, values: of the whole text; members of objects, values of any kind.
        strings: strings, each quote inside one counted as half another.
        string_bytes: of one string as it is written.
    """

    depth: int
    objects: int
    arrays: int
    members: int
    values: int
    strings: int
    string_bytes: int = 65_536

    @classmethod
    def of(cls, settings: Settings, profiles: int) -> JsonLimits:
        """What the largest graph, or the largest table of profiles, needs."""
        more = profiles + 1_000
        return cls(
            depth=32,
            objects=1_000,
            arrays=settings.most_ops + more,
            members=more,
            values=settings.most_edges + 4 * settings.most_values + 6 * settings.most_ops + 4 * more,
            strings=2 * more,
        )


class Measure:
    """Counts pieces of one text; refuses as soon as a limit is passed."""

    def __init__(self, limits: JsonLimits) -> None:
        self._limits = limits
        self._tail = b""  # a string that has begun and not ended
        self._depth = 0
        self._found = dict.fromkeys(("strings", "objects", "arrays", "members", "values"), 0)

    @property
    def built_bytes(self) -> int:
        """An estimate from above of the memory that CPython's objects for the text take, text apart."""
        found = self._found
        return 40 * found["values"] + 64 * found["arrays"] + 240 * found["objects"] + 120 * found["members"]

    def feed(self, piece: bytes) -> None:
        """Count the next piece.

        Raises:
            TooLarge: more than the limits allow.
            BadRequest: nested too deeply.
        """
        text = self._tail + piece
        self._tail = b""
        quotes = text.count(b'"')
        if quotes:
            self._add("strings", quotes // 2)
            text = self._without_strings(text)
        self._add("objects", text.count(b"{"))
        self._add("arrays", text.count(b"["))
        self._add("members", text.count(b":"))
        self._add("values", text.count(b",") + text.count(b"{") + text.count(b"["))
        steps = np.frombuffer(text.translate(_STEPS, _NOT_BRACKETS), np.int8)
        if steps.size:
            depths = np.cumsum(steps, dtype=np.int64)
            if self._depth + int(depths.max()) > self._limits.depth:
                raise BadRequest("not JSON that remat reads: nested too deeply")
            self._depth += int(depths[-1])

    def _without_strings(self, text: bytes) -> bytes:
        last = deque(_STRING.finditer(text), maxlen=1)[0]
        whole = last.group()
        if last.end() == len(text) and not _ends(whole):
            if len(whole) > self._limits.string_bytes:
                raise TooLarge(f"the body holds a string of more than {self._limits.string_bytes} bytes")
            self._tail = whole
            self._found["strings"] -= whole.count(b'"') // 2  # counted again with the rest of it
            text = text[: last.start()]
        return _STRING.sub(b"", text)

    def _add(self, what: str, count: int) -> None:
        self._found[what] += count
        most = getattr(self._limits, what)
        if self._found[what] > most:
            raise TooLarge(f"the body holds more than {most} {what}, which no request needs")


def _ends(string: bytes) -> bool:
    """Whether a match of `_STRING` at the end of a piece has its closing quote."""
    body = string[1:]
    if not body.endswith(b'"'):
        return False
    before = body[:-1]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0
