"""How a request ends: its answer from what its solve has found, in the caller's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, Status
from remat_solver import sentence

from ..context import Context
from ..storage.answers import document
from ..storage.claims import names
from ..storage.seals import Seals
from ..storage.tables import requests, solves

_QUEUED, _RUNNING, _ENDED = "queued", "running", "ended"


PROGRESS = (
    solves.c.state,
    *(solves.c[name] for name in ("cost_ns", "peak_bytes", "total_cost_ns", "bound_ns", "restricted_to", "spent_s")),
    solves.c.plan_id.label("best_plan_id"),
    solves.c.seal.label("progress_seal"),
    solves.c.queued_at,
    solves.c.started_at,
)
"""What is read of a request's solve: how far it has come."""


def told(seals: Seals, row: Any) -> dict[str, Any]:
    """What a solve has told so far, from a row with `PROGRESS`; nothing where the seal does not hold."""
    found = {"id": row.solve_id, "plan_id": row.best_plan_id, "seal": row.progress_seal}
    found |= {name: row._mapping[name] for name in ("cost_ns", "peak_bytes", "total_cost_ns", "bound_ns")}
    found["restricted_to"] = row.restricted_to or ""
    if seals.holds("solves", found):
        return found
    return dict.fromkeys(found) | {"restricted_to": ""}


def running_answer(context: Context, row: Any, status: Status | None = None) -> Answer:
    """The answer so far of a request that has not ended, in net bytes, from a row with `PROGRESS`."""
    running, known = row.state == _RUNNING, told(context.seals, row)
    seconds = row.spent_s
    if running and row.started_at is not None:
        seconds = max(seconds, min(row.time_limit_s, (context.clock.now() - row.started_at).total_seconds()))
    answer = Answer(
        status=status or (Status.RUNNING if running else Status.QUEUED),
        method=row.method,
        budget_bytes=row.budget_bytes,
        seconds=round(seconds, 3),
        restricted_to=names(known["restricted_to"]),
        digest=row.digest,
        message="" if status else ("Solving." if running else "Waiting for a free solver."),
    ).priced(known["total_cost_ns"], known["cost_ns"], known["bound_ns"], known["peak_bytes"])
    return answer if status is None else replace(answer, message=sentence(replace(answer, limit="cancel")))


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
    _, enough = await context.claims.floor(connection, row.graph_key)  # what is too small has no certificate here
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
