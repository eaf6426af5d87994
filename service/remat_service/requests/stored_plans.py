"""The best stored plan of a problem, by its digest: given, or kept from eviction."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import select

from remat_ir import Problem

from ..context import Context
from ..errors import NotFound
from ..identity import Caller
from ..storage.answers import document, rendered
from ..storage.cache_key import Keys
from ..storage.eviction import pin, unpin
from ..storage.tables import problems
from .read import plan_text


async def pin_by_digest(context: Context, caller: Caller, digest: str, pinned: bool) -> None:
    """Pin the best plan of a problem digest for the caller's tenant, or take the tenant's pins of the problem back.

    Raises:
        NotFound: this tenant's scope has none.
    """
    net, keys = await _problem_by_digest(context, caller, digest, "auto")
    known = await context.cache.known(caller, keys, net)
    if known.plan is None:
        raise NotFound("there is no plan for this digest")
    change = pin if pinned else unpin
    await change(context.database, known.plan.id, caller.tenant_id, keys.problem)


async def plan_by_digest(context: Context, caller: Caller, digest: str, method: str) -> bytes:
    """The best stored answer for a problem digest, as JSON text with its plan.

    Raises:
        NotFound: this tenant's scope has none.
    """
    net, keys = await _problem_by_digest(context, caller, digest, method)
    known = replace(await context.cache.known(caller, keys, net), near=None)
    text = None if known.plan is None else await plan_text(context, caller, known.plan, net.budget_bytes)
    if text is None:
        raise NotFound("there is no plan for this digest")
    certificate = None if known.proof is None else known.proof.text
    answer = known.with_claims(known.known.answer(method, 0.0, digest=digest))
    return rendered(document(answer, 0, cache="hit"), text, certificate)


async def _problem_by_digest(context: Context, caller: Caller, digest: str, method: str) -> tuple[Problem, Keys]:
    async with context.database.read() as connection:
        row = (
            await connection.execute(
                select(problems.c.graph_key, problems.c.budget_bytes).where(problems.c.key == caller.key(digest))
            )
        ).first()
        packed = None if row is None else await context.store.graph_row(connection, row.graph_key)
    subject = None if packed is None or row is None else await context.verifier.graph(row.graph_key, packed, caller.key)
    if subject is None or row is None:
        raise NotFound("there is no plan for this digest")
    keys = Keys(digest, caller.key(digest), row.graph_key, "", method, "")
    return Problem(subject, row.budget_bytes), keys
