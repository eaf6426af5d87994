"""Starting a solve from the plan of another."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from remat_ir import Problem

from ..context import Context
from ..errors import Invalid
from ..identity import Caller
from ..storage.cache_key import Keys
from ..storage.epochs import of_epoch
from ..storage.tables import requests
from ..storage.verifier import Verifier
from .parse import Ask


async def start_plan(context: Context, caller: Caller, ask: Ask, net: Problem, keys: Keys) -> str | None:
    """The plan of the solve that was named as a start, verified on this problem and kept under it: its id.

    Raises:
        Invalid: there is no such plan, or it is not valid for this problem.
    """
    if context.write_behind.holds(ask.start or ""):
        await context.write_behind.flush()
    async with context.database.read(brief=True) as connection:
        row = (
            await connection.execute(
                select(requests.c.plan_id, requests.c.graph_key, requests.c.ended).where(
                    requests.c.tenant_id == caller.tenant_id, requests.c.id == ask.start, of_epoch(caller.epoch)
                )
            )
        ).first()
        plan_row = None if row is None or row.plan_id is None else await context.store.plan(connection, row.plan_id)
    if plan_row is None:
        raise Invalid("start names no ended solve of yours that has a plan", "/start")
    plan = await _read_plan(context.verifier, plan_row.data)
    try:
        verdict = await context.verifier.verify(net, plan)
    except Exception as error:
        raise Invalid(f"the plan of start is not valid for this problem: {error}", "/start") from None
    async with context.database.write(brief=True) as connection:
        await context.store.put_graph(connection, keys, net)
        plan_id, digest = await context.store.put_plan(connection, keys.graph, keys.method, "start", plan, verdict)
    context.verifier.remember(keys.graph, digest, verdict, plan)
    return plan_id


async def _read_plan(verifier: Verifier, packed: bytes) -> Any:
    plan = await verifier.read_plan(packed)
    if plan is None:
        raise Invalid("the plan of start is damaged; solve it anew", "/start")
    return plan
