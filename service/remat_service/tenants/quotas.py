"""What one tenant may use: solves queued and running at once, and solver seconds a day."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import TooMany
from ..identity import Caller
from ..storage.tables import now, solves, tenants

_DAY = timedelta(days=1)


async def check_quota(connection: AsyncConnection, caller: Caller) -> None:
    """Refuse another solve over the tenant's quota; hits and joins cost nothing and are never refused.

    `most_running` is not looked at here: it holds a solve in the queue, it does not refuse it.

    Raises:
        TooMany: with the seconds after which it is worth asking again.
    """
    # locked to the end of the transaction that queues: the solves of one tenant are counted one after the other
    mine = select(tenants.c.most_queued, tenants.c.most_solver_seconds).where(tenants.c.id == caller.tenant_id)
    limits = (await connection.execute(mine.with_for_update(key_share=True))).one()
    if limits.most_queued is not None:
        queued = await connection.scalar(
            select(func.count())
            .select_from(solves)
            .where(solves.c.tenant_id == caller.tenant_id, solves.c.state == "queued")
        )
        if (queued or 0) >= limits.most_queued:
            raise TooMany(f"{queued} solves are queued, the most for this tenant", retry_after_s=10)
    if limits.most_solver_seconds is not None:
        since = now() - _DAY
        spent, first = (
            await connection.execute(
                select(func.coalesce(func.sum(solves.c.spent_s), 0.0), func.min(solves.c.queued_at)).where(
                    solves.c.tenant_id == caller.tenant_id, solves.c.queued_at >= since
                )
            )
        ).one()
        if spent >= limits.most_solver_seconds:
            wait = max(1, int((first - since).total_seconds())) if first is not None else 60
            raise TooMany(
                f"{spent:.0f} solver seconds were used in the last day, of {limits.most_solver_seconds:g}",
                retry_after_s=wait,
            )
