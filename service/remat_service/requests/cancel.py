"""Giving requests up: one by its caller; all of a solve, or of a tenant, by an operator."""

from __future__ import annotations

from sqlalchemy import ColumnElement, select

from remat_ir import Status

from ..context import Context
from ..errors import NotFound
from ..identity import Caller
from ..storage.tables import ACTIVE, requests, solves
from .completion import end_ahead
from .read import find_request


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
