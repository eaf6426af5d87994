"""Claiming a solve: a fencing token that only the latest claim holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Problem, Status

from ..context import Context
from ..identity import Caller
from ..requests.completion import end_request
from ..storage.cache_key import Keys
from ..storage.tables import requests, solves, tenants
from ..tenants.keys import caller_of

_AGAIN_S = 0.5  # between two tries to give a solve back


class LostClaim(Exception):
    """Somebody else has the solve now."""


@dataclass(frozen=True)
class Claim:
    """A solve that is ours until its `attempt` changes.

    Attributes:
        queued_s: seconds without a worker before this claim: since it was queued, or since the last sign of life of the
            worker that had it before.
    """

    id: str
    attempt: int
    caller: Caller
    row: Any
    net: Problem
    keys: Keys
    queued_s: float


async def claim_solve(context: Context, solve_id: str, ticket: int | None = None) -> Claim | None:
    """Make a queued solve ours, or one whose process has fallen silent; None where there is none."""
    moment = context.clock.now()
    async with context.database.write() as connection:
        if not await _has_room(connection, solve_id):
            return None
        seen = await connection.scalar(select(solves.c.heartbeat_at).where(solves.c.id == solve_id))
        row = (
            await connection.execute(
                update(solves)
                .where(solves.c.id == solve_id, or_(solves.c.state == "queued", context.leases.lapsed(solve_id)))
                .values(
                    state="running",
                    attempt=solves.c.attempt + 1,
                    worker=context.name,
                    ticket=ticket,
                    heartbeat_at=moment,
                    started_at=moment,
                    revision=solves.c.revision + 1,
                )
                .returning(*solves.c)
            )
        ).first()
        if row is None:
            return None
        caller = await caller_of(connection, row.tenant_id)
        packed = await context.store.graph_row(connection, row.graph_key)
    queued_s = max(0.0, (moment - (seen or row.queued_at)).total_seconds())
    context.metrics.queue_seconds.observe(queued_s)
    subject = None if packed is None else await context.verifier.graph(row.graph_key, packed, caller.key)
    if subject is None:
        await _fail(context, row, "The stored graph is damaged; POST the problem again.")
        return None
    keys = Keys("", "", row.graph_key, "", row.method_key, row.flight_key)
    return Claim(row.id, row.attempt, caller, row, Problem(subject, row.budget_bytes), keys, queued_s)


async def _has_room(connection: AsyncConnection, solve_id: str) -> bool:
    """Whether the tenant of a solve may have it running; its row is locked, so that servers count in turn."""
    owner = select(solves.c.tenant_id).where(solves.c.id == solve_id).scalar_subquery()
    limited = select(tenants).where(tenants.c.id == owner, tenants.c.most_running.is_not(None))
    tenant = (await connection.execute(limited.with_for_update(key_share=True))).first()
    if tenant is None:
        return True
    others = (solves.c.tenant_id == tenant.id, solves.c.state == "running", solves.c.id != solve_id)
    running = await connection.scalar(select(func.count()).select_from(solves).where(*others))
    return (running or 0) < int(tenant.most_running)


async def _fail(context: Context, row: Any, message: str) -> None:
    async with context.database.write() as connection:
        open_ids = await open_requests(connection, row.id)
        for request in open_ids:
            await end_request(context, connection, request.id, Status.FAILED, None, message)
        await connection.execute(
            update(solves)
            .where(solves.c.id == row.id)
            .values(state="ended", ended_at=context.clock.now(), revision=solves.c.revision + 1)
        )
    context.notifier.notify(row.id, *(request.id for request in open_ids))


async def give_back(context: Context, claim: Claim, patience_s: float = 0.0) -> None:
    """Put a solve of ours back into the queue; what it found is stored.

    Args:
        patience_s: seconds in which it is tried again where the database fails: a disk that was full has room again.
    """
    until = context.clock.monotonic() + patience_s
    while True:
        try:
            async with context.database.write() as connection:
                await connection.execute(
                    update(solves)
                    .where(solves.c.id == claim.id, solves.c.attempt == claim.attempt, solves.c.state == "running")
                    .values(state="queued", worker=None, ticket=None, revision=solves.c.revision + 1)
                )
                await context.enqueue(connection)
        except Exception:
            if context.clock.monotonic() >= until:
                return
            await asyncio.sleep(_AGAIN_S)
        else:
            context.notifier.notify("queue")
            return


async def open_requests(connection: AsyncConnection, solve_id: str) -> Sequence[Any]:
    """The requests that still wait for a solve, oldest first."""
    found = await connection.execute(
        select(requests)
        .where(requests.c.solve_id == solve_id, requests.c.ended.is_(False))
        .order_by(requests.c.created_at, requests.c.id)
    )
    return found.all()


async def limits_of_open_requests(connection: AsyncConnection, solve_id: str) -> Sequence[Any]:
    """Their ids and limits alone; there may be thousands, and they are looked at often."""
    found = await connection.execute(
        select(requests.c.id, requests.c.time_limit_s, requests.c.max_gap).where(
            requests.c.solve_id == solve_id, requests.c.ended.is_(False)
        )
    )
    return found.all()
