"""A claimed solve with all that is needed to work on it, and how it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Problem, Status

from ..context import Context
from ..identity import Caller, Keys
from ..requests.completion import end_request
from ..requests.read import stored_subject
from ..storage.queue import Claimed, LostClaim
from ..storage.tables import requests
from ..tenants.keys import caller_of

_AGAIN_S = 0.5  # between two tries to give a solve back


@dataclass(frozen=True)
class Claim(Claimed):
    """A claimed solve, its problem read."""

    caller: Caller
    net: Problem
    keys: Keys


async def read_claim(context: Context, claimed: Claimed) -> Claim | None:
    """The problem of a claimed solve; None where its graph is damaged, and the solve has failed."""
    row = claimed.row
    async with context.database.read(brief=True) as connection:
        caller = await caller_of(connection, row.tenant_id)
    subject = await stored_subject(context, caller, row.graph_key)
    if subject is None:
        await _fail(context, claimed, "The stored graph is damaged; POST the problem again.")
        return None
    keys = Keys("", "", row.graph_key, "", row.method_key, row.flight_key)
    return Claim(row, claimed.queued_s, caller, Problem(subject, row.budget_bytes), keys)


async def _fail(context: Context, claimed: Claimed, message: str) -> None:
    async with context.database.write(brief=True) as connection:
        await context.queue.settle(connection, claimed, {"state": "ended", "ended_at": context.clock.now()})
        open_ids = await open_requests(connection, claimed.id)
        for request in open_ids:
            await end_request(context, connection, request.id, Status.FAILED, None, message)
    context.notifier.notify(claimed.id, *(request.id for request in open_ids))


async def give_back(context: Context, claimed: Claimed, patience_s: float = 0.0) -> None:
    """Let a solve of ours wait again, if it still is ours; what it found is stored.

    Args:
        patience_s: seconds in which it is tried again where the database fails: a disk that was full has room again.
    """
    until = context.clock.monotonic() + patience_s
    while True:
        try:
            async with context.database.write(brief=True) as connection:
                await context.queue.settle(connection, claimed, {"state": "queued", "worker": None, "ticket": None})
        except LostClaim:
            return
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
