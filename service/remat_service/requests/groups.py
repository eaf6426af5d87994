"""Several requests under one id, as a sweep over budgets; each is an ordinary request of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select

from remat_ir import SUBJECTS, InvalidData, Problem, Subject, plain_peak
from remat_ir.document import Array, Document, Integer, Member, Nested
from remat_ir.read import kind
from remat_solver import least_need

from ..context import Context
from ..errors import NotFound, ServiceError
from ..identity import Caller, Retry
from ..settings import Settings
from ..storage.tables import groups, of_epoch, requests
from . import read
from .completion import cancel
from .parse import LIMITS, Ask, OneOf, read_limits, read_problem
from .submit import Submission

_MOST = 64
_BUDGETS, _POINTS = Member(Array(Integer(), 1, _MOST)), Member(Integer(2, _MOST))


def _sweep_of(key: str, subject: Nested, name: str, about: str, **asked: Member) -> Document:
    unread = Member(Nested(subject.documents))  # the service's caps are looked at first
    return LIMITS.extended(f"{key.title()}{name}", f"A {key}{about}", **{key: unread}, **asked)


_SWEEPS = {key: _sweep_of(key, s, "Sweep", " at many budgets.", budgets_bytes=_BUDGETS) for key, s in SUBJECTS.items()}
_TO_PEAK = "'s whole trade-off curve, from the least budget proved necessary to the plain peak."
_CURVES = {key: _sweep_of(key, s, "Curve", _TO_PEAK, points=_POINTS) for key, s in SUBJECTS.items()}
SWEEP_REQUEST = OneOf(
    "SweepRequest",
    "One step at many budgets: those named, or `points` of them over the whole curve.",
    tuple(document for key in SUBJECTS for document in (_SWEEPS[key], _CURVES[key])),
)

_SWEEP = "sweep"


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
    if not isinstance(data, Mapping):
        raise InvalidData(f"request must be an object, not {kind(data)}")
    named = [key for key in SUBJECTS if key in data]
    if len(named) != 1:
        raise InvalidData(f"request must have one of {', '.join(SUBJECTS)}, not {len(named)} of them")
    if ("budgets_bytes" in data) == ("points" in data):
        raise InvalidData("give either budgets_bytes or points", "/budgets_bytes")
    found = (_CURVES if "points" in data else _SWEEPS)[named[0]].read(data)
    subject = read_problem({named[0]: found[named[0]], "budget_bytes": 0}, settings, "").subject
    most = settings.most_sweep
    if "points" in found:
        if found["points"] > most:
            raise InvalidData(f"points must be at most {most}", "/points")
        budgets = curve(subject, found["points"])
    else:
        budgets = list(found["budgets_bytes"])
        few(budgets, "budgets_bytes", most)
    limits = read_limits(found, settings)
    asks = tuple(Ask(problem=Problem(subject, budget), **limits) for budget in budgets)
    return Group(_SWEEP, asks, {"budgets_bytes": budgets})


def few(entries: Sequence[int], what: str, most: int) -> None:
    """Refuse an array with more entries than the service takes.

    Raises:
        InvalidData: it has more.
    """
    if len(entries) > most:
        raise InvalidData(f"{what} has {len(entries)} entries, more than the {most} allowed", "/" + what)


def curve(subject: Subject, points: int) -> list[int]:
    """Budgets from the least that is proved necessary to the plain peak, evenly spaced, largest first.

    Largest first, because a bound at a larger budget holds at every smaller one.
    """
    least, most = least_need(subject)[0], plain_peak(subject)
    spread = max(0, most - least)
    return sorted({least + spread * i // (points - 1) for i in range(points)}, reverse=True)


async def start(context: Context, caller: Caller, group: Group) -> str:
    """Take in every request of a group; returns the group's id. Where one is refused, none is left queued.

    Raises:
        ServiceError: as for a single solve.
    """
    group_id = await add_group(context, caller, group)
    taken: list[str] = []
    try:
        for place, ask in enumerate(group.asks):
            retry = Retry(f"{group_id}-{place}", "")  # says which of them it is: rows may go before the group does
            taken += [await Submission(context, caller, ask, retry, group_id).submit()]
    except ServiceError:
        for request_id in taken:
            await cancel(context, caller, request_id)
        await drop_group(context, group_id)
        raise
    return group_id


async def add_group(context: Context, caller: Caller, group: Group) -> str:
    """Write a group down; returns its id."""
    group_id, moment = context.clock.new_id(), context.clock.now()
    row = {"id": group_id, "tenant_id": caller.tenant_id, "kind": group.kind, "about": group.about}
    async with context.database.write() as connection:
        await connection.execute(groups.insert().values(row | {"created_at": moment}))
    return group_id


async def drop_group(context: Context, group_id: str) -> None:
    """Forget a group of which nothing was taken in."""
    async with context.database.write() as connection:
        await connection.execute(delete(groups).where(groups.c.id == group_id))


async def group_row(context: Context, caller: Caller, kind_name: str, group_id: str) -> Any:
    """The row of a group; None where this tenant has no such group of this kind."""
    named = groups.c.id == group_id, groups.c.tenant_id == caller.tenant_id, groups.c.kind == kind_name
    return await context.database.first(select(groups).where(*named))


async def status(
    context: Context, caller: Caller, kind_name: str, group_id: str, wait_s: float
) -> tuple[dict[str, Any], bool]:
    """A group's document and whether every request in it has ended; waits for that for up to `wait_s`.

    Raises:
        NotFound: this tenant has no such group.
    """
    until = context.clock.monotonic() + min(wait_s, context.settings.longest_wait_s)
    group = await group_row(context, caller, kind_name, group_id)
    of_group = requests.c.group_id == group_id, of_epoch(caller.epoch)
    places = _places(await context.database.rows(select(requests.c.id, requests.c.idempotency_key).where(*of_group)))
    if group is None or not places:
        raise NotFound(f"there is no {kind_name} with this id")
    answers: list[dict[str, Any]] = []
    there: list[int] = []
    ended = True
    for request_id, place in places:
        try:
            row = await read.wait(context, caller, request_id, until)
        except NotFound:  # forgotten meanwhile, as over the tenant's quota
            continue
        answers.append(read.listed_answer(context, row) if row.ended else await read.current_answer(context, row))
        there.append(place)
        ended = ended and bool(row.ended)
    data: dict[str, Any] = {"id": group_id, "ended": ended, "solves": answers}
    if "batches" in group.about:
        data |= _best_batch(group.about, there, answers)
    return data, ended


async def give_up(context: Context, caller: Caller, kind_name: str, group_id: str) -> None:
    """End every request of a group that is still under way.

    Raises:
        NotFound: this tenant has no such group.
    """
    if await group_row(context, caller, kind_name, group_id) is None:
        raise NotFound(f"there is no {kind_name} with this id")
    of_group = (requests.c.group_id == group_id, requests.c.tenant_id == caller.tenant_id, of_epoch(caller.epoch))
    for row in await context.database.rows(select(requests.c.id).where(*of_group, requests.c.ended.is_(False))):
        await cancel(context, caller, row.id)


def _places(rows: Sequence[Any]) -> list[tuple[str, int]]:
    """The ids of a group's requests with their places in it, in order."""
    found = sorted((int(row.idempotency_key.rpartition("-")[2]), row.id) for row in rows)
    return [(request_id, place) for place, request_id in found]


def _best_batch(about: dict[str, Any], places: list[int], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest batch with a plan, and within the overhead where one was named; of the others nothing is claimed."""
    batches = [about["batches"][place] for place in places]
    fitting = [
        (batch, answer["id"])
        for batch, answer in zip(batches, answers, strict=True)
        if answer["overhead"] is not None
        and (about["max_overhead"] is None or answer["overhead"] <= about["max_overhead"])
    ]
    best, solve = max(fitting, default=(None, None))
    unsearched = {"bound": None, "most_cost_ns": None, "message": "Only the sizes that were named are tried."}
    return {"batches": batches, "best_batch": best, "best_solve": solve, **unsearched}
