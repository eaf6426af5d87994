"""Problems read lately, found again in other bodies by the text of their graph: the first of the three caches.

Nearly all of a body is its graph, and bodies about one graph (other budgets, methods, limits) differ in the rest alone.
The graph is cut out of the text, and what is left is parsed as ever, with a stand-in for it. A graph is remembered once
a body was read whole and found right, by tenant and by the SHA-256 of its text. So what is found equal is right too;
what is written in any other way is read whole.

Not across tenants: how long a body takes to be read would tell one whether another has sent its graph.

Bound: 400,000 ops, a small graph counted as 1,600. Invalidation: none is needed, since equal text means an equal graph.
Gain at 300 ops: 0.2 ms of processor time instead of 0.7 to parse, check and digest a graph.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import replace
from typing import Any

from remat_ir import PROBLEMS, InvalidData, Problem, Subject, Written
from remat_ir.schema import parse, refused_constant

from ..errors import ServiceError
from ..memory import Lru
from ..settings import Settings
from ..subjects import size_of
from .parse import BIG_BYTES, Ask, Body, from_body, read_ask

_MOST_REST_BYTES = 16_384
_SUBJECT = re.compile(
    rb'"(%s)"\s*+:\s*+(\{(?:[^{}"\\]++|"[^"\\]*+"|\{[^{}"\\]*+(?:"[^"\\]*+"[^{}"\\]*+)*+\})*+\})'
    % "|".join(PROBLEMS).encode()
)
"""The member of a problem that is its subject: an object in which there are others at most one deep, and no escapes."""
_STAND_IN = "-Infinity"  # no JSON: where somebody sends it, nothing is cut
_LEAST_OPS = 1_600  # a small subject counts as this many in memory, so that there are no more than some hundreds


class KnownSubjects:
    """Reads bodies; remembers their subjects."""

    def __init__(self, most_ops: int = 400_000) -> None:
        self._known: Lru[tuple[str, bytes], tuple[Subject, Written]] = Lru(most_ops)

    async def read(self, tenant_id: str, body: Body, settings: Settings) -> Ask:
        """The request in a body; a large one is read off the event loop.

        Raises:
            BadRequest: not JSON. Otherwise as `read_ask`.
        """
        cut = await asyncio.to_thread(_cut, body.text) if len(body.text) > BIG_BYTES else _cut(body.text)
        if cut is not None:
            data, subject_digest = cut
            known = self._known.get((tenant_id, subject_digest))
            ask = None if known is None else _read_known(data, *known, settings)
            if ask is not None:
                return replace(ask, body=body.digest)
        ask = await from_body(body, _read_and_write, settings)
        if cut is not None and ask.written is not None:
            subject = ask.problem.subject
            self._known.put((tenant_id, cut[1]), (subject, ask.written), max(_LEAST_OPS, size_of(subject)[0]))
        return replace(ask, body=body.digest)


def _read_and_write(data: object, settings: Settings) -> Ask:
    """The request, its subject written down: here, off the event loop where the body is large."""
    ask = read_ask(data, settings)
    return ask if ask.net is None else replace(ask, written=Written(ask.net.subject))


def _read_known(data: dict[str, Any], subject: Subject, written: Written, settings: Settings) -> Ask | None:
    """The request about a known subject; None where it is refused: whoever reads it whole can say why."""
    try:
        return replace(read_ask(data, settings, Problem(subject, data["problem"]["budget_bytes"])), written=written)
    except (InvalidData, ServiceError):
        return None


def _cut(text: bytearray) -> tuple[dict[str, Any], bytes] | None:
    """A body's value with a stand-in in the place of its subject, and the SHA-256 of that as it is written.

    None where the stand-in is not all of `problem` but the budget: a subject is only what stands there. Without escapes
    no string holds a quote, so what was cut out of a string leaves another string.
    """
    found = _SUBJECT.search(text)
    if found is None:
        return None
    start, end = found.span(2)
    if len(text) - (end - start) > _MOST_REST_BYTES:
        return None
    rest = bytes(text[:start]) + _STAND_IN.encode() + bytes(text[end:])
    if b"\\" in rest or rest.count(b"Infinity") != 1:
        return None
    try:
        data = parse(rest, lambda name: _STAND_IN if name == _STAND_IN else refused_constant(name))
    except InvalidData:
        return None
    kind = found[1].decode()
    problem = data.get("problem") if isinstance(data, dict) else None
    if not isinstance(problem, dict) or problem.keys() != {kind, "budget_bytes"} or problem[kind] is not _STAND_IN:
        return None
    return data, hashlib.sha256(memoryview(text)[found.start(1) : end]).digest()
