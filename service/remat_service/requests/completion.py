"""How a request ends: its answer from what its solve has found, in the caller's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, Status
from remat_solver.knowledge import sentence

from ..context import Context
from ..storage.answers import document
from ..storage.store import names
from ..storage.tables import now, requests, solves

_QUEUED, _RUNNING, _ENDED = "queued", "running", "ended"


def running_answer(row: Any, total_cost_ns: int | None, peak_bytes: int | None, status: Status | None = None) -> Answer:
    """The answer so far of a request that has not ended, in net bytes."""
    running = row.state == _RUNNING
    seconds = row.spent_s
    if running and row.started_at is not None:
        seconds = max(seconds, min(row.time_limit_s, (now() - row.started_at).total_seconds()))
    answer = Answer(
        status=status or (Status.RUNNING if running else Status.QUEUED),
        method=row.method,
        budget_bytes=row.budget_bytes,
        seconds=round(seconds, 3),
        restricted_to=names(row.restricted_to or ""),
        digest=row.digest,
        message="" if status else ("Solving." if running else "Waiting for a free solver."),
    ).priced(total_cost_ns, row.cost_ns, row.bound_ns, peak_bytes)
    return answer if status is None else replace(answer, message=sentence(replace(answer, limit="cancel")))


async def end_if_unwanted(connection: AsyncConnection, solve_id: str) -> None:
    """End a queued solve that nobody waits for any longer; a running one sees to that itself."""
    left = await connection.scalar(
        select(func.count()).select_from(requests).where(requests.c.solve_id == solve_id, requests.c.ended.is_(False))
    )
    if not left:
        await connection.execute(
            update(solves)
            .where(solves.c.id == solve_id, solves.c.state == _QUEUED)
            .values(state=_ENDED, ended_at=now(), revision=solves.c.revision + 1)
        )


async def end_request(
    context: Context, connection: AsyncConnection, request_id: str, status: Status, limit: str | None, message: str = ""
) -> None:
    """End a request with what its solve has found so far; one that has ended already stays as it is."""
    row = (
        await connection.execute(
            select(requests, solves.c.state, solves.c.cost_ns, solves.c.bound_ns, solves.c.restricted_to,
                   solves.c.spent_s, solves.c.plan_id.label("best_plan_id"), solves.c.started_at)
            .join(solves, solves.c.id == requests.c.solve_id)
            .where(requests.c.id == request_id, requests.c.ended.is_(False))
        )
    ).first()  # fmt: skip
    if row is None:
        return
    plan = None if row.best_plan_id is None else await context.store.plan(connection, row.best_plan_id)
    total = await context.store.total_cost(connection, row.graph_key)
    answer = running_answer(row, total, None if plan is None else plan.peak_bytes, status)
    least, enough = await context.store.floor(connection, row.graph_key)
    answer = replace(answer, limit=limit, message=message, least_budget_bytes=enough, least_budget_bound_bytes=least)
    await write_answers(connection, [(row, answer)], row.best_plan_id)


async def write_answers(
    connection: AsyncConnection, endings: Sequence[tuple[Any, Answer]], plan_id: str | None
) -> None:
    """Write the final answers, given in net bytes, of requests that share a plan."""
    if not endings:
        return
    statement = (
        update(requests)
        .where(requests.c.id == bindparam("request_id"), requests.c.ended.is_(False))
        .values(ended=True, ended_at=now(), plan_id=plan_id, answer=bindparam("said"))
    )
    rows = [
        {"request_id": row.id, "said": document(answer, row.fixed_bytes, id=row.id, cache=row.cache)}
        for row, answer in endings
    ]
    await connection.execute(statement, rows)
