"""Reading a request for a plan: what was asked, refused with the place where it is wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from remat_ir import InvalidData, Problem, Subject
from remat_ir.read import integer, kind, members, parse
from remat_solver import METHODS
from remat_solver.methods import runner_of

from ..errors import BadRequest, Invalid, TooLarge
from ..lru import Lru
from ..settings import Settings
from ..storage.cache_key import Digests, digests_of
from ..subjects import net_of, size_of

T = TypeVar("T")

LIMITS = ("method", "time_limit_s", "max_gap", "options", "priority", "queue_limit_s", "start", "force")
HIGHEST_PRIORITY = 100
_BIG_BYTES = 50_000  # larger bodies are read off the event loop
_LEAST_OPS = 1_600  # a small request counts as this many in memory, so that there are no more than some hundreds


@dataclass(frozen=True)
class Ask:
    """One request for one plan.

    Attributes:
        problem: as sent, fixed bytes included.
        time_limit_s: seconds of solving, not counting the queue.
        max_gap: stop once (cost − bound) / cost is no more than this.
        priority: −100 … 100; higher goes first.
        queue_limit_s: seconds to wait in the queue before giving up; None waits for ever.
        start: id of an ended solve whose plan to start from.
        force: solve anew even where the store has an answer.
        body: SHA-256 of the body that it was read from; empty where it was made otherwise.
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
    body: bytes = b""

    @cached_property
    def net(self) -> Problem | None:
        """The problem without its fixed bytes; None where the budget does not even cover them."""
        return net_of(self.problem)

    @cached_property
    def digests(self) -> Digests | None:
        """The digests of the net problem."""
        return None if self.net is None else digests_of(self.net)


class ParsedBodies:
    """Bodies read lately, by tenant and SHA-256: every rank of a job, and every retry, sends the same bytes.

    Not across tenants: how long a body takes to be read would tell one whether another has sent it.
    """

    def __init__(self, most_ops: int = 400_000) -> None:
        self._asks: Lru[tuple[str, bytes], Ask] = Lru(most_ops)

    async def read(self, tenant_id: str, raw: bytearray, digest: bytes, settings: Settings) -> Ask:
        """The request in a body of this SHA-256; large ones are read off the event loop.

        Raises:
            BadRequest: not JSON. Otherwise as `read_ask`.
        """
        key = (tenant_id, digest)
        ask = self._asks.get(key)
        if ask is not None:
            return ask
        ask = await from_body(raw, partial(_read_with_digests, digest), settings)
        self._asks.put(key, ask, max(_LEAST_OPS, size_of(ask.problem.subject)[0]))
        return ask


async def from_body(raw: bytearray, read: Callable[[Any, Settings], T], settings: Settings) -> T:
    """What a reader makes of a body's JSON value; a large one is parsed and read off the event loop.

    Raises:
        BadRequest: there is no body, or it is not JSON. Otherwise as the reader.
    """
    if len(raw) > _BIG_BYTES:
        return await asyncio.to_thread(lambda: read(_json(raw), settings))
    return read(_json(raw), settings)


def _json(raw: bytearray) -> Any:
    if not raw:
        raise BadRequest("the request has no body")
    try:
        return parse(raw)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _read_with_digests(body: bytes, data: object, settings: Settings) -> Ask:
    ask = replace(read_ask(data, settings), body=body)
    _ = ask.digests  # made here, off the event loop where the body is large
    return ask


def read_ask(data: object, settings: Settings) -> Ask:
    """Read the body of `POST /v1/solves`.

    Raises:
        InvalidData: malformed; the pointer leads to the place.
        TooLarge: more ops, values or edges than the service takes.
        Invalid: a limit above the service's own: refused, not clamped.
    """
    found = members(data, "request", required=("problem",), optional=LIMITS)
    ask = Ask(problem=read_problem(found["problem"], settings), **read_limits(found, settings))
    entries = model_entries(ask.problem.subject)
    if ask.method.startswith("milp") and entries > settings.most_model_entries:
        raise TooLarge(
            f"method {ask.method!r} would build a model of about {entries} entries, more than the "
            f"{settings.most_model_entries} allowed; use auto",
            "/method",
        )
    runner_of(METHODS[ask.method], ask.problem)  # refuses a method that does not take this kind of problem
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
    ):
        column = graph.get(key)
        if isinstance(column, list) and len(column) > most:
            raise TooLarge(f"graph has {len(column)} {what}, more than the {most} allowed", f"{pointer}/{key}")
    inputs = graph.get("op_inputs")
    if isinstance(inputs, list):
        edges = sum(len(row) for row in inputs if isinstance(row, list))
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
    stages = chain.get("forward_ns") if isinstance(chain, Mapping) else None
    if isinstance(stages, list) and 2 * len(stages) > settings.most_ops:
        raise TooLarge(f"chain has {len(stages)} stages, too many for {settings.most_ops} ops", pointer + "/chain")
    lengths = join.get("lengths") if isinstance(join, Mapping) else None
    if isinstance(lengths, list) and 2 * sum(n for n in lengths if type(n) is int) > settings.most_ops:
        raise TooLarge(f"join has too many steps for {settings.most_ops} ops", pointer + "/join")


def model_entries(subject: Subject) -> int:
    """An estimate of the entries of the Checkmate model of a graph: R, S and FREE of every stage, and its rows.

    Checkmate, Section 4: with n ops and m edges, n stages of n + n + m variables and about as many rows.
    """
    ops, edges = size_of(subject)
    return ops * (2 * ops + edges) * 2


def read_limits(found: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The members of a request beside its problem, checked; absent ones take their defaults."""
    asked: dict[str, Any] = {}
    if "method" in found:
        asked["method"] = method_of(found["method"])
    if "options" in found:
        options = found["options"]
        if not isinstance(options, Mapping):
            raise InvalidData(f"options must be an object, not {kind(options)}", "/options")
        METHODS[asked.get("method", "auto")].read_options(options) if options else None
        asked["options"] = dict(options)
    if "time_limit_s" in found:
        asked["time_limit_s"] = _seconds(found["time_limit_s"], "time_limit_s", settings.most_time_limit_s)
    if "max_gap" in found:
        gap = number(found["max_gap"], "max_gap", "/max_gap")
        if not 0 <= gap < 1:
            raise InvalidData(f"max_gap must be at least 0 and below 1, not {gap}", "/max_gap")
        asked["max_gap"] = gap
    if "priority" in found:
        asked["priority"] = integer(
            found["priority"], "priority", "/priority", least=-HIGHEST_PRIORITY, most=HIGHEST_PRIORITY
        )
    if found.get("queue_limit_s") is not None:
        asked["queue_limit_s"] = _seconds(found["queue_limit_s"], "queue_limit_s", settings.most_queue_limit_s)
    if found.get("start") is not None:
        if not isinstance(found["start"], str):
            raise InvalidData(f"start must be the id of a solve, not {kind(found['start'])}", "/start")
        asked["start"] = found["start"]
    if "force" in found:
        if not isinstance(found["force"], bool):
            raise InvalidData(f"force must be a boolean, not {kind(found['force'])}", "/force")
        asked["force"] = found["force"]
    return asked


def number(value: object, what: str, pointer: str) -> float:
    """A finite JSON number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidData(f"{what} must be a number, not {kind(value)}", pointer)
    try:
        found = float(value)
    except OverflowError:
        raise InvalidData(f"{what} is too large", pointer) from None
    if not math.isfinite(found):
        raise InvalidData(f"{what} must be finite", pointer)
    return found


def method_of(name: object) -> str:
    """The name of a method that there is."""
    if not isinstance(name, str):
        raise InvalidData(f"method must be a string, not {kind(name)}", "/method")
    if name not in METHODS:
        raise InvalidData(f"unknown method {name[:60]!r}; there are: {', '.join(METHODS)}", "/method")
    return name


def _seconds(value: object, what: str, most: float) -> float:
    seconds = number(value, what, "/" + what)
    if seconds <= 0:
        raise InvalidData(f"{what} must be positive, not {seconds}", "/" + what)
    if seconds > most:
        raise Invalid(f"{what} is {seconds:g}, over this service's limit of {most:g}", "/" + what)
    return seconds
