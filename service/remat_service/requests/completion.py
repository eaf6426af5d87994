"""How a request ends: with its solve, or given up; its answer is what its solve has found, in the caller's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, Status

from ..context import Context
from ..errors import NotFound
from ..identity import Caller
from ..storage.answers import document
from ..storage.tables import ACTIVE, requests, solves
from .read import PROGRESS, find_request, running_answer, told

_QUEUED, _ENDED = "queued", "ended"


async def end_if_unwanted(context: Context, connection: AsyncConnection, solve_id: str) -> None:
    """End a queued solve that nobody waits for any longer; a running one sees to that itself."""
    left = await connection.scalar(
        select(func.count()).select_from(requests).where(requests.c.solve_id == solve_id, requests.c.ended.is_(False))
    )
    if not left:
        await connection.execute(
            update(solves)
            .where(solves.c.id == solve_id, solves.c.state == _QUEUED)
            .values(state=_ENDED, ended_at=context.clock.now(), revision=solves.c.revision + 1)
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
        if unless_started and state != _QUEUED:
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
    enough = await context.claims.enough(connection, row.graph_key)  # what is too small has no certificate here
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
) -> None:
    """Write the final answers, given in net bytes, of requests that share a plan and a certificate."""
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
            answer=bindparam("said"),
            seal=bindparam("signed"),
        )
    )
    rows = []
    for row, answer in endings:
        said = document(answer, row.fixed_bytes, id=row.id, cache=row.cache)
        signed = {**row._mapping, "plan_id": plan_id, "proof_id": proof_id, "answer": said}
        rows.append({"request_id": row.id, "said": said, "signed": context.seals.sealed("requests", signed)["seal"]})
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
    async with context.database.read() as connection:
        if await connection.scalar(select(solves.c.id).where(solves.c.id == solve_id)) is None:
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
