"""Giving a request up."""

from __future__ import annotations

from sqlalchemy import select

from remat_ir import Status

from ..context import Context
from ..identity import Caller
from ..storage.tables import solves
from .completion import end_if_unwanted, end_request
from .read import find_request


async def cancel(context: Context, caller: Caller, request_id: str) -> None:
    """Detach a request from its solve; its answer becomes the best incumbent. The solve ends with its last request."""
    row = await find_request(context, caller, request_id)
    if row.ended:
        return
    async with context.database.write(brief=True) as connection:
        await connection.execute(select(solves.c.id).where(solves.c.id == row.solve_id).with_for_update())
        await end_request(context, connection, request_id, Status.CANCELLED, "cancel")
        await end_if_unwanted(context, connection, row.solve_id)
    context.notifier.notify(request_id, row.solve_id)
