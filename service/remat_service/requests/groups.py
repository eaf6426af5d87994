"""Several requests under one id: a sweep over budgets, or over batch sizes; each is an ordinary request of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import delete, select

from remat_ir import Graph, InvalidData, Problem, Subject, plain_peak
from remat_ir.read import array, integer, integers, kind, members
from remat_solver.bounds import least_need

from ..context import Context
from ..errors import Invalid, NotFound, ServiceError
from ..identity import Caller, new_id
from ..settings import Settings
from ..storage.epochs import of_epoch
from ..storage.tables import groups, now, requests
from . import read
from .cancel import cancel
from .parse import LIMITS, Ask, number, read_limits, read_problem
from .submit import Submission

_SUBJECTS = ("graph", "chain", "join")
_SWEEP, _BATCH = "sweep", "max-batch"


@dataclass(frozen=True)
class Group:
    """What was asked: the asks in order, and what to remember of them."""

    kind: str
    asks: tuple[Ask, ...]
    about: dict[str, Any]


def read_sweep(data: object, settings: Settings) -> Group:
    """Read `POST /v1/sweeps`: a subject and either `budgets_bytes` or a number of `points` for the whole curve.

    The curve runs from the least budget that is proved necessary to the plain peak.

    Raises:
        InvalidData, TooLarge, Invalid: as for a single solve.
    """
    found = members(data, "request", required=(), optional=(*_SUBJECTS, "budgets_bytes", "points", *LIMITS))
    subject = _subject(found, settings)
    if ("budgets_bytes" in found) == ("points" in found):
        raise InvalidData("give either budgets_bytes or points", "/budgets_bytes")
    if "points" in found:
        points = integer(found["points"], "points", "/points", least=2, most=settings.most_sweep)
        budgets = curve(subject, points)
    else:
        rows = array(found["budgets_bytes"], "budgets_bytes", "/budgets_bytes", settings.most_sweep)
        if not rows:
            raise InvalidData("budgets_bytes is empty", "/budgets_bytes")
        budgets = [integer(row, f"budgets_bytes[{i}]", f"/budgets_bytes/{i}") for i, row in enumerate(rows)]
    limits = read_limits(found, settings)
    asks = tuple(Ask(problem=Problem(subject, budget), **limits) for budget in budgets)
    return Group(_SWEEP, asks, {"budgets_bytes": list(budgets)})


def curve(subject: Subject, points: int) -> list[int]:
    """Budgets from the least that is proved necessary to the plain peak, evenly spaced, largest first.

    Largest first, because a bound at a larger budget holds at every smaller one.
    """
    least, most = least_need(subject)[0], plain_peak(subject)
    spread = max(0, most - least)
    return sorted({least + spread * i // (points - 1) for i in range(points)}, reverse=True)


def read_batches(data: object, settings: Settings) -> Group:
    """Read `POST /v1/max-batch`: a graph captured at one batch size, and the batch sizes to try within one budget.

    Costs, workspaces and `batch_values` (by default every value that is not kept to the end: gradients of parameters
    don't grow) are scaled in proportion, rounded up.

    Raises:
        InvalidData, TooLarge, Invalid: as for a single solve.
    """
    found = members(
        data,
        "request",
        required=("problem", "batch", "batches"),
        optional=("batch_values", "max_overhead", *LIMITS),
    )
    problem = read_problem(found["problem"], settings)
    if not isinstance(problem.subject, Graph):
        raise InvalidData("max-batch scales graphs only", "/problem")
    batch = integer(found["batch"], "batch", "/batch", least=1, most=10**6)
    rows = array(found["batches"], "batches", "/batches", settings.most_sweep)
    if not rows:
        raise InvalidData("batches is empty", "/batches")
    batches = [integer(row, f"batches[{i}]", f"/batches/{i}", least=1, most=10**6) for i, row in enumerate(rows)]
    values: tuple[int, ...] | None = None
    if found.get("batch_values") is not None:
        values = integers(found["batch_values"], "batch_values", "/batch_values", settings.most_values)
        for i, value in enumerate(values):
            if not 0 <= value < problem.subject.values:
                raise InvalidData(f"batch_values[{i}]: there is no value {value}", f"/batch_values/{i}")
    overhead = None
    if found.get("max_overhead") is not None:
        overhead = number(found["max_overhead"], "max_overhead", "/max_overhead")
        if overhead < 0:
            raise InvalidData("max_overhead must not be negative", "/max_overhead")
    limits = read_limits(found, settings)
    asks = []
    for i, size in enumerate(batches):
        try:
            graph = scaled(problem.subject, batch, size, values)
        except InvalidData as error:
            raise Invalid(f"at batch {size}: {error}", f"/batches/{i}") from None
        asks.append(Ask(problem=Problem(graph, problem.budget_bytes), **limits))
    return Group(_BATCH, tuple(asks), {"batches": batches, "max_overhead": overhead})


def scaled(graph: Graph, batch: int, size: int, values: tuple[int, ...] | None = None) -> Graph:
    """The graph at another batch size: what grows with it, in proportion and rounded up."""
    growing = frozenset(range(graph.values)) - frozenset(graph.keep) if values is None else frozenset(values)

    def grow(number: int) -> int:
        return -(-number * size // batch)

    return replace(
        graph,
        op_cost_ns=tuple(map(grow, graph.op_cost_ns)),
        op_workspace_bytes=tuple(map(grow, graph.op_workspace_bytes)),
        value_bytes=tuple(grow(b) if v in growing else b for v, b in enumerate(graph.value_bytes)),
        op_names=None,
        value_names=None,
    )


def _subject(found: Mapping[str, Any], settings: Settings) -> Subject:
    named = [key for key in _SUBJECTS if key in found]
    if len(named) != 1:
        raise InvalidData(f"request must have one of {', '.join(_SUBJECTS)}, not {len(named)} of them")
    data = {named[0]: found[named[0]], "budget_bytes": 0}
    if not isinstance(found[named[0]], Mapping):
        raise InvalidData(f"{named[0]} must be an object, not {kind(found[named[0]])}", "/" + named[0])
    return read_problem(data, settings, "").subject


async def start(context: Context, caller: Caller, group: Group) -> str:
    """Take in every request of a group; returns the group's id. Where one is refused, none is left queued.

    Raises:
        ServiceError: as for a single solve.
    """
    group_id = new_id()
    async with context.database.write() as connection:
        await connection.execute(
            groups.insert().values(
                id=group_id, tenant_id=caller.tenant_id, kind=group.kind, about=group.about, created_at=now()
            )
        )
    taken: list[str] = []
    try:
        for ask in group.asks:
            taken += [await Submission(context, caller, ask, None, group_id).submit()]
    except ServiceError:
        for request_id in taken:
            await cancel(context, caller, request_id)
        async with context.database.write() as connection:
            await connection.execute(delete(groups).where(groups.c.id == group_id))
        raise
    return group_id


async def status(
    context: Context, caller: Caller, kind_name: str, group_id: str, wait_s: float
) -> tuple[dict[str, Any], bool]:
    """A group's document and whether every request in it has ended; waits for that for up to `wait_s`.

    Raises:
        NotFound: this tenant has no such group.
    """
    until = time.monotonic() + min(wait_s, context.settings.longest_wait_s)
    async with context.database.read() as connection:
        group = (
            await connection.execute(
                select(groups).where(
                    groups.c.id == group_id, groups.c.tenant_id == caller.tenant_id, groups.c.kind == kind_name
                )
            )
        ).first()
        found = await connection.execute(
            select(requests.c.id).where(requests.c.group_id == group_id, of_epoch(caller.epoch)).order_by(requests.c.id)
        )
        ids = [row.id for row in found]
    if group is None or not ids:
        raise NotFound(f"there is no {kind_name} with this id")
    answers, ended = [], True
    for request_id in ids:
        row = await read.wait(context, caller, request_id, until)
        answers.append(row.answer if row.ended else await read.current_answer(context, row))
        ended = ended and bool(row.ended)
    data: dict[str, Any] = {"id": group_id, "ended": ended, "solves": answers}
    if kind_name == _BATCH:
        data |= _best_batch(group.about, answers)
    return data, ended


def _best_batch(about: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest batch with a plan, and within the overhead where one was named."""
    fitting = [
        batch
        for batch, answer in zip(about["batches"], answers, strict=False)
        if answer["overhead"] is not None
        and (about["max_overhead"] is None or answer["overhead"] <= about["max_overhead"])
    ]
    return {"batches": about["batches"], "best_batch": max(fitting, default=None)}
