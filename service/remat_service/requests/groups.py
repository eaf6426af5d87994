"""Several requests under one id, each an ordinary request of its own: a sweep over budgets, and the largest batch.

The largest batch inside a budget is that of sizes that the caller names, or is searched for, one solve after another. A
search's state is in its row, and each of its solves has an idempotency key made of the search, the round and the batch:
a process that takes a search up again, after a restart or next to another, asks for the same solves and comes to the
same end.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

import structlog
from sqlalchemy import delete, select, update

from remat_ir import (
    LARGEST_BATCH,
    PROBLEMS,
    SUBJECTS,
    Answer,
    BatchFamily,
    Graph,
    InvalidData,
    Plan,
    Problem,
    Status,
    Subject,
    plain_peak,
)
from remat_ir.document import AnyObject, Array, Column, Document, Integer, Member, Nested, Number
from remat_ir.read import array
from remat_solver import BatchSearch, least_need

from ..context import Context
from ..errors import Gone, Invalid, NotFound, RateLimited, ServiceError, Unavailable
from ..identity import Caller, Retry
from ..settings import Settings
from ..storage.tables import groups, of_epoch, requests
from . import read
from .completion import cancel
from .parse import LIMITS, Ask, OneOf, read_limits, read_problem
from .submit import Submission

log = structlog.get_logger("remat_service.requests.batches")

SWEEP, MAX_BATCH = "sweep", "max-batch"
_LOOK_S = 1.0
_POLL_S = 5.0

_NO_LIMIT_NS = 2**63
"""More than any plan that can be stored costs, and exact in a reader that holds numbers as doubles."""

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

_BATCH_SIZE = Integer(1, LARGEST_BATCH)
BATCH_REQUEST = LIMITS.extended(
    "BatchRequest",
    "A graph captured at one batch size. Without `batches`, the largest batch is searched for, with a bound.",
    problem=Member(Nested((PROBLEMS["graph"],))),
    batch=Member(_BATCH_SIZE, 1, "The batch size that the graph was captured at."),
    batches=Member(Array(_BATCH_SIZE, 1, 64), None, "Try these and no others.", nullable=True),
    batch_values=Member(Column(), None, "Values that grow with it; by default all but kept.", nullable=True),
    batch_bytes=Member(Integer(), 0, "How many of the fixed bytes are the input batch."),
    max_overhead=Member(
        Number(least=0),
        None,
        "Over the cost of each op once; a search without it allows one more forward pass (Checkmate, equation 9).",
        nullable=True,
    ),
    total_s=Member(Number(above=0), 600.0, "Seconds for the whole search; `time_limit_s` is for its first solves."),
)


@dataclass(frozen=True)
class Group:
    """What was asked: the asks in order, and what to remember of them."""

    kind: str
    asks: tuple[Ask, ...]
    about: dict[str, Any]


def read_sweep(data: Any, settings: Settings) -> Group:
    """Read `POST /v1/sweeps`: a subject and either `budgets_bytes` or a number of `points` for the whole curve.

    The curve runs from the least budget that is proved necessary to the plain peak.

    Raises:
        InvalidData, TooLarge, Invalid: as for a single solve.
    """
    data = AnyObject().read(data, "request", "")
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
        budgets = list(array(found["budgets_bytes"], "budgets_bytes", "/budgets_bytes", most))
    limits = read_limits(found, settings)
    asks = tuple(Ask(problem=Problem(subject, budget), **limits) for budget in budgets)
    return Group(SWEEP, asks, {"budgets_bytes": budgets})


def curve(subject: Subject, points: int) -> list[int]:
    """Budgets from the least that is proved necessary to the plain peak, evenly spaced, largest first.

    Largest first, because a bound at a larger budget holds at every smaller one.
    """
    least, most = least_need(subject)[0], plain_peak(subject)
    spread = max(0, most - least)
    return sorted({least + spread * i // (points - 1) for i in range(points)}, reverse=True)


def read_batches(data: object, settings: Settings) -> Group:
    """Read `POST /v1/max-batch`: the sizes to try as asks, or no asks and what a search needs to know.

    Raises:
        InvalidData, TooLarge, Invalid: as for a single solve; nothing in the graph grows; there is no backward pass,
            or, in a search, a link to the host.
    """
    found = BATCH_REQUEST.read(data)
    problem = read_problem(found["problem"], settings)
    if not isinstance(problem.subject, Graph):
        raise InvalidData("max-batch scales graphs only", "/problem")
    array(found.get("batches") or (), "batches", "/batches", settings.most_sweep)
    array(found.get("batch_values") or (), "batch_values", "/batch_values", settings.most_values)
    about = {key: found.get(key) for key in ("batch_values", "max_overhead")}
    about |= {"batch": found.get("batch", 1), "batch_bytes": found.get("batch_bytes", 0)}
    family = _family(about, problem)
    limits = read_limits(found, settings)
    if found.get("batches") is None:
        return Group(MAX_BATCH, (), about | _search(family, found, limits))
    asks = []
    for i, size in enumerate(found["batches"]):
        try:
            asks.append(Ask(problem=Problem(family.scaled(size), problem.budget_bytes), **limits))
        except InvalidData as error:
            raise Invalid(f"at batch {size}: {error}", f"/batches/{i}") from None
    return Group(MAX_BATCH, tuple(asks), {"batches": list(found["batches"]), "max_overhead": about["max_overhead"]})


def _family(about: dict[str, Any], problem: Problem) -> BatchFamily:
    values = None if about["batch_values"] is None else tuple(about["batch_values"])
    return BatchFamily(problem.graph, problem.budget_bytes, about["batch"], values, about["batch_bytes"])


def _search(family: BatchFamily, found: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """What a search keeps in its row."""
    total, overhead = family.graph.total_cost_ns, found.get("max_overhead")
    most = family.most_cost_ns() if overhead is None else int(min(total * (1 + overhead), _NO_LIMIT_NS))
    ceiling = family.ceiling(lambda graph: least_need(graph)[0])
    search = BatchSearch(0, ceiling if most >= total else 0)
    return {
        "problem": Problem(family.graph, family.budget_bytes).to_json(),
        "limits": limits,
        "most_cost_ns": most,
        "total_s": found.get("total_s", 600.0),
        "state": _state(search),
        "tried": [],
        "best_solve": None,
        "ended": None,
    }


def _state(search: BatchSearch) -> dict[str, Any]:
    return asdict(search) | {"unclear": sorted(search.unclear)}


async def start(context: Context, searches: BatchSearches, caller: Caller, group: Group) -> str:
    """Take in every request of a group, or the first of a search; returns the group's id.

    Where one is refused, none is left queued.

    Raises:
        ServiceError: as for a single solve.
    """
    group_id, moment = context.clock.new_id(), context.clock.now()
    row = {"id": group_id, "tenant_id": caller.tenant_id, "kind": group.kind, "about": group.about}
    async with context.database.write() as connection:
        await connection.execute(groups.insert().values(row | {"created_at": moment}))
    taken: list[str] = []
    try:
        for place, ask in enumerate(group.asks):
            retry = Retry(f"{group_id}-{place}", "")  # says which of them it is: rows may go before the group does
            taken += [await Submission(context, caller, ask, retry, group_id).submit()]
        if not group.asks:
            await _Step(context, caller, group_id, group.about, 0.0).submit()
    except ServiceError:
        for request_id in taken:
            await cancel(context, caller, request_id)
        async with context.database.write() as connection:
            await connection.execute(delete(groups).where(groups.c.id == group_id))
        raise
    if not group.asks:
        searches.drive(caller, group_id)
    return group_id


async def _group_row(context: Context, caller: Caller, kind_name: str, group_id: str) -> Any:
    """The row of a group; None where this tenant has no such group of this kind."""
    named = groups.c.id == group_id, groups.c.tenant_id == caller.tenant_id, groups.c.kind == kind_name
    return await context.database.first(select(groups).where(*named))


class BatchSearches:
    """The searches that this process drives, each in a task of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def drive(self, caller: Caller, group_id: str) -> None:
        """See a search to its end, unless this process does already."""
        if group_id not in self._tasks and not self._context.stopping:
            self._tasks[group_id] = task = asyncio.create_task(self._drive(caller, group_id))
            task.add_done_callback(lambda _: self._tasks.pop(group_id, None))

    async def stop(self) -> None:
        """Leave the searches where they are; who polls one takes it up again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drive(self, caller: Caller, group_id: str) -> None:
        context = self._context
        begun: float | None = None
        try:
            while not context.stopping:
                row = await _group_row(context, caller, MAX_BATCH, group_id)
                if row is None or row.about["ended"] is not None:
                    return
                if begun is None:  # from here on the wall clock may jump
                    begun = context.clock.monotonic() - (context.clock.now() - row.created_at).total_seconds()
                try:
                    await _Step(context, caller, group_id, row.about, context.clock.monotonic() - begun).run()
                except (RateLimited, Unavailable) as error:
                    await asyncio.sleep(min(30.0, error.retry_after_s or _LOOK_S))
                except ServiceError as error:
                    await _save(context, group_id, ended=str(error))
                context.notifier.notify(group_id)
        except Exception:
            log.exception("a search for the largest batch broke off; the next poll takes it up", group=group_id)


class _Step:
    """One batch of a search: its solve, until it is decided or out of time, and what follows from it."""

    def __init__(
        self, context: Context, caller: Caller, group_id: str, about: dict[str, Any], elapsed_s: float
    ) -> None:
        self.context, self.caller, self.group_id = context, caller, group_id
        self.about = about
        self.family = _family(about, Problem.from_json(about["problem"]))
        state = about["state"]
        self.search = BatchSearch(**state | {"unclear": set(state["unclear"])})
        self.batch = self.search.next_batch()
        self.deadline = context.clock.monotonic() + about["total_s"] - elapsed_s

    async def submit(self) -> str | None:
        """Ask for the solve of the next batch; its request's id, or None where there is nothing more to try."""
        if self.batch is None:
            return None
        limits = dict(self.about["limits"])
        longest = self.context.settings.most_time_limit_s
        limits["time_limit_s"] = min(longest, self.search.factor * limits.get("time_limit_s", Ask.time_limit_s))
        problem = await asyncio.to_thread(self.family.at, self.batch)
        retry = Retry(f"{self.group_id}-{self.search.factor}-{self.batch}", "")
        request_id = await Submission(self.context, self.caller, Ask(problem, **limits), retry, self.group_id).submit()
        self.about["state"] = _state(self.search)
        if [self.batch, request_id] not in self.about["tried"]:
            self.about["tried"].append([self.batch, request_id])
        tried = self.about["tried"]
        if not await _save(self.context, self.group_id, state=self.about["state"], tried=tried):
            await cancel(self.context, self.caller, request_id)  # somebody has given the search up meanwhile
            return None
        return request_id

    async def run(self) -> None:
        """See the next batch to its end, and write down what it says about the others."""
        request_id = await self.submit() if self.context.clock.monotonic() < self.deadline else None
        if request_id is None or self.batch is None:
            proved = self.search.floor == self.search.ceiling
            ended = "proved" if proved else "time" if self.search.again or self.batch is not None else "unclear"
            await _save(self.context, self.group_id, ended=ended)
            return
        row = await self._decided(request_id)
        if row is None:
            return
        await self._conclude(row)
        best = self.about["best_solve"]
        await _save(self.context, self.group_id, state=_state(self.search), best_solve=best)

    async def _decided(self, request_id: str) -> Any:
        """The row of the request, ended: by itself, or because its plan is cheap enough or its bound too high."""
        context, most = self.context, self.about["most_cost_ns"]
        while True:
            row = await read.wait(context, self.caller, request_id, context.clock.monotonic() + _LOOK_S)
            if row.ended:
                return row
            if context.stopping:
                return None
            known = Answer.from_json(read.listed_answer(context, row))
            if _cheap(known, most) or _hopeless(known, most) or context.clock.monotonic() > self.deadline:
                await cancel(context, self.caller, request_id)

    async def _conclude(self, row: Any) -> None:
        most, batch = self.about["most_cost_ns"], self.batch
        assert batch is not None
        answer = Answer.from_json(read.listed_answer(self.context, row))
        if _cheap(answer, most):
            try:
                body = await read.ended_body(self.context, self.caller, row.id)
            except Gone:
                body = None
            # evicted or damaged between two looks: the batch itself was reached all the same
            plan, reach = None if body is None else Answer.from_json(body).plan, batch
            if isinstance(plan, Plan):
                reach = max(batch, await asyncio.to_thread(self.family.largest, plan))
            if reach > self.search.floor:
                self.about["best_solve"] = row.id
            self.search.reached(reach)
        elif _hopeless(answer, most):
            self.search.impossible(batch)
        else:
            self.search.tried(batch, answer.limit in ("time", "cancel"))


def _cheap(answer: Answer, most_ns: int) -> bool:
    return answer.cost_ns is not None and answer.cost_ns <= most_ns


def _hopeless(answer: Answer, most_ns: int) -> bool:
    """Whether no plan at all fits, or none that is cheap enough: of the whole space only."""
    if answer.restricted_to:
        return False
    return answer.status is Status.INFEASIBLE or (answer.bound_ns is not None and answer.bound_ns > most_ns)


async def _save(context: Context, group_id: str, **changes: Any) -> bool:
    """Write down what is new of a search; False where it has ended before."""
    if "ended" in changes:
        changes["problem"] = None  # nothing more is scaled
    this = groups.c.id == group_id
    async with context.database.write() as connection:
        row = (await connection.execute(select(groups.c.about).where(this).with_for_update())).first()
        if row is None or row.about["ended"] is not None:
            return False
        await connection.execute(update(groups).where(this).values(about=row.about | changes))
    return True


async def status(
    context: Context, searches: BatchSearches, caller: Caller, kind_name: str, group_id: str, wait_s: float
) -> tuple[dict[str, Any], bool]:
    """A group's document and whether all of it has ended; waits for that for up to `wait_s`.

    Raises:
        NotFound: this tenant has no such group.
    """
    until = context.clock.monotonic() + min(wait_s, context.settings.longest_wait_s)
    with context.notifier.subscribe(group_id) as changes:
        while True:
            changes.reset()
            row = await _group_row(context, caller, kind_name, group_id)
            if row is None:
                raise NotFound(f"there is no {kind_name} with this id")
            if "state" not in row.about:
                return await _of_asks(context, caller, row, until)
            ended = row.about["ended"] is not None
            left = until - context.clock.monotonic()
            if ended or left <= 0 or context.leaving:
                return await _of_search(context, caller, row), ended
            searches.drive(caller, group_id)
            await changes.wait(min(left, _POLL_S))


async def _of_asks(context: Context, caller: Caller, group: Any, until: float) -> tuple[dict[str, Any], bool]:
    """The document of a group whose requests were named, and whether every one of them has ended."""
    of_group = requests.c.group_id == group.id, of_epoch(caller.epoch)
    rows = await context.database.rows(select(requests.c.id, requests.c.idempotency_key).where(*of_group))
    places = sorted((int(row.idempotency_key.rpartition("-")[2]), row.id) for row in rows)  # as `start` names them
    if not places:
        raise NotFound(f"there is no {group.kind} with this id")
    answers: list[dict[str, Any]] = []
    there: list[int] = []
    ended = True
    for place, request_id in places:
        try:
            row = await read.wait(context, caller, request_id, until)
        except NotFound:  # forgotten meanwhile, as over the tenant's quota
            continue
        answers.append(read.listed_answer(context, row))
        there.append(place)
        ended = ended and bool(row.ended)
    data: dict[str, Any] = {"id": group.id, "ended": ended, "solves": answers}
    if "batches" in group.about:
        data |= _best_batch(group.about, there, answers)
    return data, ended


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


async def _of_search(context: Context, caller: Caller, row: Any) -> dict[str, Any]:
    about = row.about
    batches, solves = [], []
    for batch, request_id in about["tried"]:
        try:
            one = await read.find_request(context, caller, request_id)
        except NotFound:  # forgotten, as over the tenant's quota: what it said stands
            continue
        batches.append(batch)
        solves.append(read.listed_answer(context, one))
    if about["tried"] and not solves:
        raise NotFound(f"there is no {row.kind} with this id")
    return {
        "id": row.id,
        "ended": about["ended"] is not None,
        "solves": solves,
        "batches": batches,
        "best_batch": about["state"]["floor"] or None,
        "bound": about["state"]["ceiling"],
        "best_solve": about["best_solve"] if about["best_solve"] in [each["id"] for each in solves] else None,
        "most_cost_ns": about["most_cost_ns"],
        "message": _MESSAGES.get(about["ended"] or "", about["ended"] or "Searching."),
    }


_MESSAGES = {
    "proved": "No larger batch has a plan within the budget and the cost.",
    "time": "The time was up: whether batches between best_batch and bound have a plan is open.",
    "unclear": "No method decides the batches between best_batch and bound.",
    "cancelled": "The search was given up.",
}


async def give_up(context: Context, caller: Caller, kind_name: str, group_id: str) -> None:
    """End a group, a search too, and every request of it that is still under way.

    Raises:
        NotFound: this tenant has no such group.
    """
    group = await _group_row(context, caller, kind_name, group_id)
    if group is None:
        raise NotFound(f"there is no {kind_name} with this id")
    if "state" in group.about:
        await _save(context, group_id, ended="cancelled")
    of_group = (requests.c.group_id == group_id, requests.c.tenant_id == caller.tenant_id, of_epoch(caller.epoch))
    for row in await context.database.rows(select(requests.c.id).where(*of_group, requests.c.ended.is_(False))):
        await cancel(context, caller, row.id)
    context.notifier.notify(group_id)
