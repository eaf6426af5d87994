"""Reading a request for a plan: what was asked, refused with the place where it is wrong.

Problems read lately are found again in other bodies by the text of their graph (`KnownSubjects`): the first of the
three caches. Nearly all of a body is its graph, and bodies about one graph (other budgets, methods, limits) differ in
the rest alone. The graph is cut out of the text, and what is left is parsed as ever, with a stand-in for it. A graph is
remembered once a body was read whole and found right, by tenant and by the SHA-256 of its text. So what is found equal
is right too; what is written in any other way is read whole.

Not across tenants: how long a body takes to be read would tell one whether another has sent its graph.

Bound: 400,000 ops, a small graph counted as 1,600. Invalidation: none is needed, since equal text means an equal graph.
Gain at 300 ops: 0.2 ms of processor time instead of 0.7 to parse, check and digest a graph.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from remat_ir import PROBLEMS, Digests, InvalidData, Problem, Subject, Written, readable
from remat_ir.document import AnyObject, Document, Flag, Integer, Member, Nested, Number, Text
from remat_ir.read import length, length_of_rows, parse, refused_constant
from remat_solver import METHODS, runner_of

from ..errors import BadRequest, Invalid, ServiceError, TooLarge
from ..identity import size_of, with_fixed
from ..memory import Lru
from ..settings import Settings
from .columns import separate

T = TypeVar("T")

_BUDGET = Member(Integer(), 0)
LIMITS = Document(
    "Limits",
    "request",
    "How to look for a plan, and for how long.",
    {
        "method": Member(Text(), "auto", "A name of `GET /v1/capabilities`."),
        "options": Member(AnyObject(), {}, "The method's own options."),
        "time_limit_s": Member(Number(above=0), 60.0, "Seconds of solving, the queue not counted."),
        "max_gap": Member(Number(least=0, below=1), 0.001, "Stop once (cost − bound) / cost is no more."),
        "priority": Member(Integer(-100, 100), 0, "Of your own solves, higher goes first."),
        "queue_limit_s": Member(Number(above=0), None, nullable=True),
        "start": Member(
            Text(called="the id of a solve"), None, "Id of an ended solve whose plan to start from.", nullable=True
        ),
        "force": Member(Flag(), False, "Solve anew even where the store has an answer."),
        "certify": Member(Flag(), True, "Whether a bound counts only with a certificate, where there are any."),
        "name": Member(
            Text(100), None, "What it is called in the tenant's lists; it plays no part in the answer.", nullable=True
        ),
    },
)
SOLVE_REQUEST = LIMITS.extended(
    "SolveRequest",
    "A request for a plan.",
    problem=Member(Nested(tuple(PROBLEMS.values()))),
)


@dataclass(frozen=True)
class OneOf:
    """One of several documents, under a name of its own."""

    name: str
    about: str
    nested: tuple[Document, ...]

    def schema(self) -> dict[str, Any]:
        """The JSON Schema."""
        return {"title": self.name, "description": self.about, **Nested(self.nested).schema()}


CHECK_REQUEST = OneOf(
    "ValidateRequest",
    "What to check.",
    tuple(
        problem.extended(f"{key.title()}Check", f"A {key} to check; a budget may come with it.", budget_bytes=_BUDGET)
        for key, problem in PROBLEMS.items()
    ),
)

MOST_READING_BYTES = 56 << 20
"""What a body may take until it is refused or accepted, its text included."""
BIG_BYTES = 50_000  # larger bodies are read off the event loop
_MOST_ROWS = 101_000  # arrays of a table of profiles, and of what stands around it
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string, or the beginning of one up to the end of the text: it matches at every opening quote, in linear time."""


_MOST_REST_BYTES = 16_384
_SUBJECT = re.compile(
    rb'"(%s)"\s*+:\s*+(\{(?:[^{}"\\]++|"[^"\\]*+"|\{[^{}"\\]*+(?:"[^"\\]*+"[^{}"\\]*+)*+\})*+\})'
    % "|".join(PROBLEMS).encode()
)
"""The member of a problem that is its subject: an object in which there are others at most one deep, and no escapes."""
_STAND_IN = "-Infinity"  # no JSON: where somebody sends it, nothing is cut
_LEAST_OPS = 1_600  # a small subject counts as this many in memory, so that there are no more than some hundreds


@dataclass(frozen=True)
class Ask:
    """One request for one plan.

    Attributes:
        problem: as sent, fixed bytes included.
        method, …, name: as `LIMITS` says of each; without a queue limit the request waits for ever.
        body: SHA-256 of the body that it was read from; empty where it was made otherwise.
        written: its subject without fixed bytes, written down for its digests; None where that was not done yet.
    """

    problem: Problem
    method: str = "auto"
    options: dict[str, object] = field(default_factory=dict)
    time_limit_s: float = 60.0
    max_gap: float = 0.001
    priority: int = 0
    queue_limit_s: float | None = None
    start: str | None = None
    force: bool = False
    certify: bool = True
    name: str | None = None
    body: bytes = b""
    written: Written | None = field(default=None, repr=False, compare=False)

    @cached_property
    def net(self) -> Problem | None:
        """The problem without its fixed bytes; None where the budget does not even cover them."""
        budget = self.problem.budget_bytes - self.problem.subject.fixed_bytes
        return None if budget < 0 else Problem(self.text.subject, budget)

    @cached_property
    def text(self) -> Written:
        """The subject without fixed bytes, written down."""
        return self.written or Written(with_fixed(self.problem.subject, 0))

    @cached_property
    def digests(self) -> Digests | None:
        """The digests of the net problem."""
        return None if self.net is None else self.text.digests(self.net.budget_bytes)


class Body(NamedTuple):
    """A body as it came.

    Attributes:
        text: JSON, no longer encoded.
        hold: counts what is about to be built from it, in bytes, and refuses it where there is no room.
        digest: SHA-256 of the text.
    """

    text: bytearray
    hold: Callable[[int], None]
    digest: bytes


async def from_body(body: Body, read: Callable[[Any, Settings], T], settings: Settings) -> T:
    """What a reader makes of a body's JSON value; a large one is parsed and read off the event loop.

    Raises:
        BadRequest: there is no body, or it is not JSON. Otherwise as the reader.
    """
    if len(body.text) > BIG_BYTES:
        return await asyncio.to_thread(lambda: read(_json(body, settings), settings))
    return read(_json(body, settings), settings)


def _json(body: Body, settings: Settings) -> Any:
    """The value of a body; where its objects would take much, its long arrays are read as columns.

    Raises:
        BadRequest: no JSON.
        TooLarge: it would take more memory than a body may while it is read.
    """
    raw = body.text
    if not raw:
        raise BadRequest("the request has no body")
    built = _built(raw)
    body.hold(min(built, MOST_READING_BYTES))
    try:
        if built + _copies(raw) <= MOST_READING_BYTES:
            return parse(raw)
        _check_arrays(raw, settings)
        longest = max(settings.most_ops, settings.most_edges, settings.most_values)
        separated = separate(raw, longest, MOST_READING_BYTES)
        taken = len(raw) + separated.taken + _built(separated.rest) + _copies(separated.rest)
        if taken > MOST_READING_BYTES:
            raise TooLarge(
                f"the body would take {readable(taken)} to read, more than the {readable(MOST_READING_BYTES)} allowed"
            )
        return separated.parse()
    except InvalidData as error:
        raise BadRequest(str(error)) from None


def _copies(text: bytes | bytearray) -> int:
    """An estimate from above of what a text takes, with what is decoded of it, and its strings once more."""
    return (3 if text.isascii() else 9) * len(text)


def _built(text: bytes | bytearray) -> int:
    """An estimate from above of what the objects of a text take, strings apart."""
    return sum(text.count(mark) * size for mark, size in ((b",", 56), (b"[", 200), (b"{", 300), (b":", 120)))


def _check_arrays(text: bytearray, settings: Settings) -> None:
    """Refuse a text with more strings or arrays than any request has: to cut these out takes time for each.

    Raises:
        TooLarge: it has more.
    """
    most = settings.most_ops + _MOST_ROWS
    if text.count(b'"') > 4 * most:
        raise TooLarge(f"the body holds more than {2 * most} strings, which no request needs")
    within = sum(text.count(b"[", *string.span()) for string in _STRING.finditer(text))
    if text.count(b"[") - within > most:
        raise TooLarge(f"the body holds more than {most} arrays, which no request needs")


def read_ask(data: object, settings: Settings, known: Problem | None = None, **more: Any) -> Ask:
    """Read the body of `POST /v1/solves`.

    Args:
        known: its problem, where that was read before.
        more: members of the result that are not in the body's value.

    Raises:
        InvalidData: malformed; the pointer leads to the place.
        TooLarge: more ops, values or edges than the service takes.
        Invalid: a limit above the service's own: refused, not clamped.
    """
    found = SOLVE_REQUEST.read(data)
    limits = read_limits(found, settings)
    method = limits.get("method", "auto")
    graph = found["problem"].get("graph") if isinstance(found["problem"], Mapping) else None
    if method.startswith("milp") and isinstance(graph, Mapping):  # before its tuples are made
        check_size(graph, settings, "/problem/graph")
        _check_entries(method, length(graph.get("op_cost_ns")), length_of_rows(graph.get("op_inputs")), settings)
    ask = Ask(problem=known or read_problem(found["problem"], settings), **limits, **more)
    if method.startswith("milp"):
        _check_entries(method, *size_of(ask.problem.subject), settings)
    runner_of(METHODS[method], ask.problem)  # refuses a method that does not take this kind of problem
    return ask


def read_problem(data: object, settings: Settings, pointer: str = "/problem") -> Problem:
    """Read a problem and hold it to the service's caps; the caps are looked at before the graph is built."""
    if isinstance(data, Mapping):
        check_size(data.get("graph"), settings, pointer + "/graph")
        check_stages(data, settings, pointer)
    try:
        return Problem.from_json(data)
    except InvalidData as error:
        raise error.under(pointer) from None


def check_size(graph: object, settings: Settings, pointer: str) -> None:
    """Refuse a graph over the caps on ops, values and edges.

    Raises:
        TooLarge: with the pointer of the array that is too long.
    """
    if not isinstance(graph, Mapping):
        return
    for key, most, what in (
        ("op_cost_ns", settings.most_ops, "ops"),
        ("op_inputs", settings.most_ops, "ops"),
        ("value_op", settings.most_values, "values"),
        ("value_bytes", settings.most_values, "values"),
        ("nodes", settings.most_ops, "ops"),
        ("links", settings.most_edges, "inputs in all"),
        ("edges", settings.most_edges, "inputs in all"),
    ):
        count = length(graph.get(key))
        if count > most:
            raise TooLarge(f"graph has {count} {what}, more than the {most} allowed", f"{pointer}/{key}")
    edges = length_of_rows(graph.get("op_inputs"))
    if edges > settings.most_edges:
        raise TooLarge(
            f"graph has {edges} inputs in all, more than the {settings.most_edges} allowed", f"{pointer}/op_inputs"
        )


def check_stages(problem: Mapping[str, Any], settings: Settings, pointer: str) -> None:
    """Refuse a chain or a join over the cap on ops.

    Raises:
        TooLarge: with the pointer of the array that is too long.
    """
    chain, join = problem.get("chain"), problem.get("join")
    stages = length(chain.get("forward_ns")) if isinstance(chain, Mapping) else 0
    if 2 * stages > settings.most_ops:
        raise TooLarge(f"chain has {stages} stages, too many for {settings.most_ops} ops", pointer + "/chain")
    lengths = join.get("lengths") if isinstance(join, Mapping) else None
    if isinstance(lengths, list) and 2 * sum(n for n in lengths if type(n) is int) > settings.most_ops:
        raise TooLarge(f"join has too many steps for {settings.most_ops} ops", pointer + "/join")


def model_entries(ops: int, edges: int) -> int:
    """An estimate of the entries of the Checkmate model of a graph: R, S and FREE of every stage, and its rows.

    Checkmate, Section 4: with n ops and m edges, n stages of n + n + m variables and about as many rows.
    """
    return ops * (2 * ops + edges) * 2


def _check_entries(method: str, ops: int, edges: int, settings: Settings) -> None:
    entries = model_entries(ops, edges)
    if entries > settings.most_model_entries:
        raise TooLarge(
            f"method {method!r} would build a model of about {entries} entries, more than the "
            f"{settings.most_model_entries} allowed; use auto",
            "/method",
        )


def read_limits(found: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The limits of a request that has been read, held to what this service has and allows.

    Raises:
        InvalidData: there is no such method, or it takes no such options.
        Invalid: over the service's own limits: refused, not clamped.
    """
    asked = {name: found[name] for name in LIMITS.members if name in found}
    method = method_of(asked.get("method", "auto"))
    if asked.get("options"):
        METHODS[method].read_options(asked["options"])
    for name, most in (("time_limit_s", settings.most_time_limit_s), ("queue_limit_s", settings.most_queue_limit_s)):
        seconds = asked.get(name)
        if seconds is not None and seconds > most:
            raise Invalid(f"{name} is {seconds:g}, over this service's limit of {most:g}", "/" + name)
    if Ask.time_limit_s > settings.most_time_limit_s:  # what is not named is no more than may be asked for
        asked.setdefault("time_limit_s", settings.most_time_limit_s)
    return asked


def method_of(name: str) -> str:
    """The name of a method that there is.

    Raises:
        InvalidData: there is none of this name.
    """
    if name not in METHODS:
        raise InvalidData(f"unknown method {name[:60]!r}; there are: {', '.join(METHODS)}", "/method")
    return name


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
            ask = None if known is None else _read_known(data, *known, settings, body.digest)
            if ask is not None:
                return ask
        ask = await from_body(body, _read_and_write, settings)
        if cut is not None and ask.written is not None:
            subject = ask.problem.subject
            self._known.put((tenant_id, cut[1]), (subject, ask.written), max(_LEAST_OPS, size_of(subject)[0]))
        return replace(ask, body=body.digest)


def _read_and_write(data: object, settings: Settings) -> Ask:
    """The request, its subject written down: here, off the event loop where the body is large."""
    ask = read_ask(data, settings)
    return ask if ask.net is None else replace(ask, written=ask.text)


def _read_known(
    data: dict[str, Any], subject: Subject, written: Written, settings: Settings, digest: bytes
) -> Ask | None:
    """The request about a known subject; None where it is refused: whoever reads it whole can say why."""
    try:
        known = Problem(subject, data["problem"]["budget_bytes"])
        return read_ask(data, settings, known, written=written, body=digest)
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
