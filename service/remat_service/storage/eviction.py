"""What is evicted and when; what is pinned stays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..settings import Settings
from ..telemetry import Metrics
from .database import Database, try_lock
from .tables import attachments, graphs, groups, pins, plans, proofs, requests, solves

_BATCH = 100
_LOCK = 0x6B656570  # one process at a time sums the store up
HIT_BYTES = 1_256  # of a row of `requests` that was answered from the store, with its indexes, as PostgreSQL stores it
_HIT = and_(requests.c.ended.is_(True), requests.c.cache == "hit", requests.c.group_id.is_(None))
"""Requests that were answered at once from the store: another POST gives the same. Not those without a solve: the solve
of a graph that was forgotten is gone, and the id of its request still says so."""


async def evict(database: Database, settings: Settings, metrics: Metrics) -> int:
    """Forget what is old, then the least used until the store is within its bytes; returns the graphs forgotten."""
    cutoff = database.clock.now() - timedelta(days=settings.store_days)
    async with database.write() as connection:
        if not await try_lock(connection, _LOCK):
            return 0
        hits_cutoff = database.clock.now() - timedelta(days=settings.hit_days)
        for which, before in ((_HIT, hits_cutoff), (requests.c.ended.is_(True), cutoff)):
            done = await connection.execute(delete(requests).where(which, requests.c.ended_at < before))
            metrics.evicted.labels("request").inc(done.rowcount)
        await connection.execute(
            delete(solves).where(solves.c.state == "ended", ~exists().where(requests.c.solve_id == solves.c.id))
        )
        await connection.execute(delete(groups).where(groups.c.created_at < cutoff))
        old = await connection.execute(delete(plans).where(plans.c.pinned.is_(False), plans.c.used_at < cutoff))
        metrics.evicted.labels("plan").inc(old.rowcount)
        metrics.evicted.labels("proof").inc(await _drop_weaker_proofs(connection))
        gone = await _drop(connection, select(graphs.c.key).where(*_free(), graphs.c.used_at < cutoff))
        while (over := await store_bytes(connection) - settings.store_bytes) > 0:
            if hits := await drop_oldest(connection, 1 + over // HIT_BYTES, _HIT):
                metrics.evicted.labels("request").inc(hits)
                continue
            least_used = select(graphs.c.key).where(*_free()).order_by(graphs.c.used_at).limit(_BATCH)
            dropped = await _drop(connection, least_used)
            gone += dropped
            if not dropped:
                break
    metrics.evicted.labels("graph").inc(gone)
    return gone


async def _drop_weaker_proofs(connection: AsyncConnection) -> int:
    """Forget certificates that another one of the same graph, budget and space outdoes, and that no answer names."""
    better = proofs.alias("better")
    outdone = exists().where(
        better.c.graph_key == proofs.c.graph_key,
        better.c.budget_bytes == proofs.c.budget_bytes,
        better.c.restricted_to == proofs.c.restricted_to,
        better.c.bound_ns > proofs.c.bound_ns,
    )
    found = (await connection.scalars(select(proofs.c.id).where(outdone).limit(_BATCH * 5))).all()
    if not found:  # requests are not looked through for nothing
        return 0
    named = select(requests.c.proof_id).where(requests.c.proof_id.in_(found))
    return (await connection.execute(delete(proofs).where(proofs.c.id.in_(found), proofs.c.id.not_in(named)))).rowcount


async def drop_oldest(connection: AsyncConnection, most: int, *which: ColumnElement[bool]) -> int:
    """Forget the oldest of these requests, up to so many; how many there were."""
    oldest = select(requests.c.id).where(*which).order_by(requests.c.id).limit(most)
    return (await connection.execute(delete(requests).where(requests.c.id.in_(oldest)))).rowcount


def _free() -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Whether a graph has no pinned plan and no solve under way."""
    pinned = exists().where(plans.c.graph_key == graphs.c.key, plans.c.pinned.is_(True))
    busy = exists().where(solves.c.graph_key == graphs.c.key, solves.c.state.in_(("queued", "running")))
    return ~pinned, ~busy


async def _drop(connection: AsyncConnection, query: Select[Any]) -> int:
    """Forget graphs that are free, without those that somebody writes about; how many there were.

    Once they are locked no solve of theirs can be queued, and those that came before the lock are seen.
    """
    keys = (await connection.scalars(query.with_for_update(skip_locked=True))).all()
    gone = 0
    for start in range(0, len(keys), _BATCH):
        batch = graphs.c.key.in_(keys[start : start + _BATCH])
        gone += (await connection.execute(delete(graphs).where(batch, *_free()))).rowcount
    return gone


async def store_bytes(connection: AsyncConnection) -> int:
    """Bytes of graphs, plans, certificates and attachments in the store, and of the rows of hits."""
    total = HIT_BYTES * int(await connection.scalar(select(func.count()).select_from(requests).where(_HIT)) or 0)
    return total + sum([await rows_bytes(connection, table) for table in (graphs, plans, proofs, attachments)])


async def rows_bytes(connection: AsyncConnection, table: Table, *which: ColumnElement[bool]) -> int:
    """Bytes of what the rows of a table hold."""
    return int(await connection.scalar(select(func.sum(table.c.size_bytes)).where(*which)) or 0)


async def pin(database: Database, plan_id: str, tenant_id: str, problem_key: str) -> None:
    """Keep a plan, if it is still there, from eviction for a tenant and a problem."""
    row = {"plan_id": plan_id, "tenant_id": tenant_id, "problem_key": problem_key}
    async with database.write() as connection:
        done = await connection.execute(update(plans).where(plans.c.id == plan_id).values(pinned=True))
        if done.rowcount:
            await connection.execute(database.insert(pins).values(row).on_conflict_do_nothing())


async def unpin(database: Database, plan_id: str, tenant_id: str, problem_key: str) -> None:
    """Let go of what a tenant has pinned for a problem; what others have pinned stays.

    Args:
        plan_id: the best plan by now, which may be another one, or pinned by nobody, from before pins had owners.
    """
    async with database.write() as connection:
        mine = pins.c.tenant_id == tenant_id, pins.c.problem_key == problem_key
        own = await connection.scalars(delete(pins).where(*mine).returning(pins.c.plan_id))
        kept = exists().where(pins.c.plan_id == plans.c.id)
        await connection.execute(update(plans).where(plans.c.id.in_([plan_id, *own]), ~kept).values(pinned=False))
