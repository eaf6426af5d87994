"""How a request ends: with its solve, given up, or out of patience; its answer is what its solve has found.

And the loops that go on for ever next to the requests: eviction, requests that have waited too long, notes that were
lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy import ColumnElement, bindparam, exists, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, Status

from ..context import Context
from ..errors import NotFound
from ..identity import Caller
from ..storage.answers import document
from ..storage.database import Outage
from ..storage.eviction import evict
from ..storage.tables import ACTIVE, requests, solves
from ..tenants.quotas import trim_requests
from .read import PROGRESS, find_request, running_answer, told

log = structlog.get_logger("remat_service.requests.completion")

_POLL_S = 5.0
_IDS_A_QUERY = 500
State = tuple[object, ...]
"""What a listener would see: whether the request has ended, and its solve's state, cost and bound."""


async def end_if_unwanted(context: Context, connection: AsyncConnection, solve_id: str) -> None:
    """End a queued solve that nobody waits for any longer; a running one sees to that itself."""
    wanted = exists().where(requests.c.solve_id == solve_id, requests.c.ended.is_(False))
    await connection.execute(
        update(solves)
        .where(solves.c.id == solve_id, solves.c.state == "queued", ~wanted)
        .values(state="ended", ended_at=context.clock.now(), revision=solves.c.revision + 1)
    )


async def end_ahead(
    context: Context,
    request_id: str,
    solve_id: str,
    status: Status,
    limit: str,
    message: str = "",
    unless_started: bool = False,
) -> None:
    """End a request before its solve has: its answer is the best incumbent. A solve ends with its last request."""
    async with context.database.write(brief=True) as connection:
        state = await connection.scalar(select(solves.c.state).where(solves.c.id == solve_id).with_for_update())
        if unless_started and state != "queued":
            return
        await end_request(context, connection, request_id, status, limit, message)
        await end_if_unwanted(context, connection, solve_id)
    context.notifier.notify(request_id, solve_id)


async def end_request(
    context: Context, connection: AsyncConnection, request_id: str, status: Status, limit: str | None, message: str = ""
) -> None:
    """End a request with what its solve has found so far; one that has ended already stays as it is."""
    row = (
        await connection.execute(
            select(requests, *PROGRESS)
            .join(solves, solves.c.id == requests.c.solve_id)
            .where(requests.c.id == request_id, requests.c.ended.is_(False))
        )
    ).first()
    if row is None:
        return
    answer = running_answer(context, row, status)
    enough = await context.store.enough(connection, row.graph_key)  # what is too small has no certificate here
    answer = replace(answer, limit=limit, message=message, least_budget_bytes=enough)
    known, own = told(context.seals, row), await context.store.own_proof(connection, row.graph_key, row.budget_bytes)
    proved = max(known["total_cost_ns"] or 0, 0 if own is None else own[1])
    if answer.bound_ns is not None and answer.bound_ns > proved:
        answer = replace(answer, claimed_bound_ns=answer.bound_ns, claimed_by=answer.method)
    proof_id = None if own is None or answer.bound_ns is None else own[0]
    await write_answers(context, connection, [(row, answer)], known["plan_id"], proof_id)


async def write_answers(
    context: Context,
    connection: AsyncConnection,
    endings: Sequence[tuple[Any, Answer]],
    plan_id: str | None,
    proof_id: str | None,
    source: str | None = None,
) -> None:
    """Write the final answers, given in net bytes, of requests that share a plan and a certificate.

    Args:
        source: where in the store it is from, although they were queued; None: it was solved.
    """
    if not endings:
        return
    statement = (
        update(requests)
        .where(requests.c.id == bindparam("request_id"), requests.c.ended.is_(False))
        .values(
            ended=True,
            ended_at=context.clock.now(),
            plan_id=plan_id,
            proof_id=proof_id,
            cache=bindparam("known"),
            answer=bindparam("said"),
            seal=bindparam("signed"),
        )
    )
    rows = []
    for row, answer in endings:
        cache = source or row.cache
        said = document(answer, row.fixed_bytes, id=row.id, cache=cache)
        signed = {**row._mapping, "plan_id": plan_id, "proof_id": proof_id, "cache": cache, "answer": said}
        seal = context.seals.sealed("requests", signed)["seal"]
        rows.append({"request_id": row.id, "known": cache, "said": said, "signed": seal})
    await connection.execute(statement, rows)


async def cancel(context: Context, caller: Caller, request_id: str) -> None:
    """Detach a request from its solve; its answer becomes the best incumbent. The solve ends with its last request."""
    row = await find_request(context, caller, request_id)
    if not row.ended:
        await end_ahead(context, request_id, row.solve_id, Status.CANCELLED, "cancel")


async def cancel_solve(context: Context, solve_id: str) -> int:
    """End every request that waits for a solve with what it has found; how many. A running one then ends by itself.

    Raises:
        NotFound: there is no such solve.
    """
    if await context.database.first(select(solves.c.id).where(solves.c.id == solve_id)) is None:
        raise NotFound(f"there is no solve {solve_id!r}")
    return await _cancel_all(context, requests.c.solve_id == solve_id)


async def cancel_tenant(context: Context, tenant_id: str) -> int:
    """End every request of a tenant that is under way; how many. Solves that others wait for go on."""
    return await _cancel_all(context, requests.c.tenant_id == tenant_id)


async def _cancel_all(context: Context, which: ColumnElement[bool]) -> int:
    query = select(requests.c.id, requests.c.solve_id).join(solves, solves.c.id == requests.c.solve_id)
    async with context.database.read() as connection:
        found = (await connection.execute(query.where(which, requests.c.ended.is_(False), ACTIVE))).all()
    for row in found:
        await end_ahead(context, row.id, row.solve_id, Status.CANCELLED, "cancel", "An operator ended it.")
    return len(found)


async def housekeeping(context: Context) -> None:
    """Evict by age and bytes, and end requests that have waited too long, for ever."""
    evicted, outage = -float("inf"), Outage(log, "housekeeping")
    while not context.stopping:
        with outage:
            await expire_queued(context)
            if context.clock.monotonic() - evicted >= context.settings.housekeeping_s:
                await evict(context.database, context.settings, context.metrics)
                async with context.database.write() as connection:
                    context.metrics.evicted.labels("request").inc(await trim_requests(connection))
                evicted = context.clock.monotonic()
        await asyncio.sleep(min(context.settings.housekeeping_s, 5.0))


async def expire_queued(context: Context) -> None:
    """End requests whose queue limit has passed before their solve was started."""
    asked = context.waits.moment()
    query = (
        select(requests.c.id, requests.c.queue_limit_s, requests.c.solve_id, solves.c.state)
        .join(solves, solves.c.id == requests.c.solve_id)
        .where(requests.c.ended.is_(False), requests.c.queue_limit_s.is_not(None))
    )
    async with context.database.read() as connection:
        rows = (await connection.execute(query)).all()
    context.waits.forget_others((row.id for row in rows), asked)
    for row in rows:
        context.waits.begin(row.id)  # another process may have taken it in
    late = [row for row in rows if row.state == "queued" and context.waits.seconds(row.id, asked) > row.queue_limit_s]
    said = "The queue limit has passed before a solver was free."
    for row in late:
        await end_ahead(context, row.id, row.solve_id, Status.NOTHING_FOUND, "time", said, unless_started=True)


async def poll(context: Context) -> None:
    """Wake the waits and streams of this process whose requests have changed, every few seconds, for ever.

    Waits don't look by themselves, so that their number costs the database nothing.
    """
    seen: dict[str, State] = {}
    outage = Outage(log, "looking for lost notes")
    while not context.stopping:
        with outage:
            seen = await look(context, seen)
        await asyncio.sleep(_POLL_S)


async def look(context: Context, seen: dict[str, State]) -> dict[str, State]:
    """Compare the watched requests with what was seen before, wake who waits for one that differs; what is seen now.

    A request seen for the first time counts as changed: it may have, between its listener's look and this one.
    """
    watched = sorted(context.notifier.keys())
    found: dict[str, State] = {}
    for start in range(0, len(watched), _IDS_A_QUERY):
        query = (
            select(requests.c.id, requests.c.ended, solves.c.state, solves.c.cost_ns, solves.c.bound_ns)
            .outerjoin(solves, solves.c.id == requests.c.solve_id)
            .where(requests.c.id.in_(watched[start : start + _IDS_A_QUERY]))
        )
        found |= {row.id: tuple(row[1:]) for row in await context.database.rows(query)}
    context.notifier.notify_here(*(key for key, state in found.items() if seen.get(key) != state))
    return found
