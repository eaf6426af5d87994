"""Lists of requests: filtered, sorted, a page at a time, with the requests of a group folded into one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Float, Select, and_, case, cast, func, literal, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from ..context import Context
from ..errors import Invalid
from ..identity import Caller
from ..storage.tables import graphs, groups, of_epoch, requests, solves
from .read import PROGRESS, listed_answer

SORTS = ("created_at", "status", "ops", "budget_bytes", "overhead", "gap", "seconds")
"""What a list can be sorted by; ties, and `created_at` itself, go by the id, which grows with time."""


@dataclass(frozen=True)
class Selection:
    """Which requests to list.

    Attributes:
        statuses: only these; empty means all.
        search: only those whose id begins with it, or whose name or method has it.
        group_id: only those of this group.
        fold: of a group, only its newest request that is listed otherwise.
        sort: one of `SORTS`.
        descending: largest, newest or last in the alphabet first.
    """

    statuses: tuple[str, ...] = ()
    search: str = ""
    group_id: str | None = None
    fold: bool = False
    sort: str = "created_at"
    descending: bool = True


async def list_requests(
    context: Context, caller: Caller, chosen: Selection, limit: int, after: str | None
) -> dict[str, Any]:
    """A page of a tenant's requests, which goes on behind the request `after`.

    Raises:
        Invalid: there is no request `after`.
    """
    await context.write_behind.flush()
    async with context.database.read() as connection:
        query = _query(caller, chosen).limit(limit + 1)
        if after is not None:
            key = _sort_key(chosen.sort)
            here = tuple_(key, requests.c.id)
            there = tuple_(literal(await _key_of(connection, caller, key, after), key.type), literal(after))
            query = query.where(here < there if chosen.descending else here > there)
        rows = (await connection.execute(query)).all()
        groups_there = await _groups(connection, {row.group_id for row in rows[:limit] if row.group_id is not None})
    found = []
    for row in rows[:limit]:
        data = listed_answer(context, row)
        peak = row.plain_peak_bytes
        data |= {
            "ops": row.ops,
            "joined": max(0, (row.joined or 0) - 1),
            "name": row.name,
            "created_at": row.created_at.isoformat(),
            "plain_peak_bytes": None if peak is None else peak + row.fixed_bytes,
            "group": None,
        }
        if row.group_id is not None and row.group_kind is not None:
            data["group"] = {"id": row.group_id, "kind": row.group_kind, **groups_there[row.group_id]}
        found.append(data)
    return {"solves": found, "next": rows[limit - 1].id if len(rows) > limit else None}


async def _groups(connection: AsyncConnection, ids: set[str]) -> dict[str, dict[str, Any]]:
    """What each group comes to: its requests, how many have ended, and with a plan, its budgets, the batch reached."""
    whole, state = requests.c.budget_bytes + requests.c.fixed_bytes, groups.c.about["state"]
    planned = and_(requests.c.ended, requests.c.answer["overhead"].as_string().is_not(None))
    query = (
        select(
            requests.c.group_id,
            func.count().label("requests"),
            func.sum(case((requests.c.ended, 1), else_=0)).label("ended"),
            func.sum(case((planned, 1), else_=0)).label("planned"),
            func.min(whole).label("least_budget_bytes"),
            func.max(whole).label("most_budget_bytes"),
        )
        .where(requests.c.group_id.in_(ids))
        .group_by(requests.c.group_id)
    )
    batches = select(groups.c.id, state["floor"].as_integer(), state["ceiling"].as_integer()).where(
        groups.c.id.in_(ids)
    )
    reached = {group_id: (floor, ceiling) for group_id, floor, ceiling in await connection.execute(batches)}
    outcome = {}
    for row in (await connection.execute(query)).mappings():
        numbers = {name: int(value) for name, value in row.items() if name != "group_id"}
        batch, bound = reached.get(row["group_id"], (None, None))
        outcome[row["group_id"]] = {**numbers, "best_batch": batch or None, "bound": bound}
    return outcome


async def _key_of(connection: AsyncConnection, caller: Caller, key: ColumnElement[Any], request_id: str) -> Any:
    """What the request at the end of a page is sorted by.

    Raises:
        Invalid: there is no such request any more, and it is sorted by something else than its id.
    """
    if key is requests.c.id:
        return request_id
    found = (await connection.execute(_rows(caller, key.label("key")).where(requests.c.id == request_id))).first()
    if found is None:
        raise Invalid("query after: there is no solve with this id")
    return found.key


def _rows(caller: Caller, *columns: Any) -> Select[Any]:
    """A tenant's requests with what is known of their solves and graphs."""
    return (
        select(*columns)
        .select_from(requests)
        .outerjoin(solves, solves.c.id == requests.c.solve_id)
        .outerjoin(graphs, graphs.c.key == requests.c.graph_key)
        .where(requests.c.tenant_id == caller.tenant_id, of_epoch(caller.epoch))
    )


def _query(caller: Caller, chosen: Selection) -> Select[Any]:
    other = requests.alias("others")
    joined = select(func.count()).where(other.c.solve_id == requests.c.solve_id).correlate(requests).scalar_subquery()
    columns = (graphs.c.ops, graphs.c.plain_peak_bytes, joined.label("joined"), groups.c.kind.label("group_kind"))
    query = _rows(caller, requests, *PROGRESS, *columns).outerjoin(groups, groups.c.id == requests.c.group_id)
    query = query.where(*_conditions(requests, solves, chosen))
    if chosen.fold:
        newer, its_solve = requests.alias("newer"), solves.alias("its_solve")
        behind = (
            select(newer.c.id)
            .outerjoin(its_solve, its_solve.c.id == newer.c.solve_id)
            .where(newer.c.group_id == requests.c.group_id, newer.c.id > requests.c.id)
            .where(*_conditions(newer, its_solve, chosen))
            .correlate(requests)
        )
        query = query.where(or_(requests.c.group_id.is_(None), ~behind.exists()))
    key = _sort_key(chosen.sort)
    order = (key, requests.c.id)
    return query.order_by(*(column.desc() if chosen.descending else column.asc() for column in order))


def _status(request: Any, solve: Any) -> ColumnElement[str]:
    """The status that the answer of a row has: stored in it once it has ended, its solve's state before."""
    running = case((solve.c.state == "running", "running"), else_="queued")
    return case((request.c.ended, func.coalesce(request.c.answer["status"].as_string(), "failed")), else_=running)


def _conditions(request: Any, solve: Any, chosen: Selection) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if chosen.statuses:
        found.append(_status(request, solve).in_(chosen.statuses))
    if chosen.group_id is not None:
        found.append(request.c.group_id == chosen.group_id)
    if chosen.search:
        wanted = chosen.search.lower()
        found.append(
            or_(
                request.c.id.startswith(wanted, autoescape=True),
                func.lower(request.c.method).contains(wanted, autoescape=True),
                func.lower(request.c.name).contains(wanted, autoescape=True),
            )
        )
    return found


def _sort_key(sort: str) -> ColumnElement[Any]:
    """What a list is sorted by; a row that has none comes after those that do, where the largest come first."""
    if sort == "created_at":
        return requests.c.id
    if sort == "status":
        return _status(requests, solves)
    if sort == "budget_bytes":
        return cast(requests.c.budget_bytes + requests.c.fixed_bytes, Float)
    if sort == "ops":
        return cast(func.coalesce(graphs.c.ops, -1), Float)
    ended = and_(requests.c.ended, requests.c.answer[sort].as_string().is_not(None))
    return case((ended, requests.c.answer[sort].as_float()), else_=-1.0)
