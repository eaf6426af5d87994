"""A request comes in: it is answered from the store, joined to a solve under way, or queued."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import and_, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, Problem, Status, problem_digest
from remat_solver.bounds import least_need

from ..context import Context
from ..errors import Conflict, Unavailable
from ..identity import Caller, Retry, new_id
from ..storage.answers import document
from ..storage.cache import Known, answer_of, is_final
from ..storage.cache_key import Keys, keys_of, method_key_of
from ..storage.epochs import of_epoch
from ..storage.snapshot import Snapshot
from ..storage.tables import ACTIVE, now, requests, solves
from ..tenants.quotas import check_quota
from .parse import Ask
from .start import start_plan

_QUEUED = "queued"


async def submit(
    context: Context, caller: Caller, ask: Ask, retry: Retry | None = None, group_id: str | None = None
) -> str:
    """Take a request in; returns its id. What it gets is there to read at once, or later.

    Raises:
        Conflict: the idempotency key was used with another body.
        NotFound: there is no such solve to start from.
        Unavailable: the queue is full.
        TooMany: the tenant's quota is used up.
    """
    try:
        return await _earlier(context, caller, retry) or await _answer_or_queue(context, caller, ask, retry, group_id)
    except IntegrityError:  # the same request came twice at once, and the other was quicker
        earlier = await _earlier(context, caller, retry)
        if earlier is None:
            raise
        return earlier


async def _answer_or_queue(
    context: Context, caller: Caller, ask: Ask, retry: Retry | None, group_id: str | None
) -> str:
    net, digests = ask.net, ask.digests
    if net is None or digests is None:
        return await _answer_infeasible(context, caller, ask, retry, group_id)
    method_key = method_key_of(ask.method, ask.options, ask.start)
    keys = keys_of(caller, digests, method_key)
    snapshot = await context.snapshots.read(keys, net.budget_bytes)
    if snapshot.under_way:  # it has all that the store has, and more to come
        joined = await _join_flight(context, caller, ask, keys, retry, group_id)
        if joined is not None:
            return joined
        snapshot = await context.snapshots.read(keys, net.budget_bytes)
    known = Known() if ask.force else await context.cache.known(caller, keys, net, snapshot)
    if not ask.force and is_final(known, net, ask.max_gap, ask.time_limit_s):
        return await _answer_from_store(context, caller, ask, net, keys, known, snapshot, retry, group_id)
    start_plan_id = None if ask.start is None else await start_plan(context, caller, ask, net, keys)
    return await _queue(context, caller, ask, net, keys, known, start_plan_id, retry, group_id)


async def _earlier(context: Context, caller: Caller, retry: Retry | None) -> str | None:
    if retry is None:
        return None
    if context.write_behind.holds_key(caller.tenant_id, retry.key):
        await context.write_behind.flush()
    if not await context.snapshots.has_idempotency_key(caller.tenant_id, retry.key):
        return None
    of_key = and_(requests.c.tenant_id == caller.tenant_id, requests.c.idempotency_key == retry.key)
    async with context.database.read() as connection:
        query = select(requests.c.id, requests.c.body_hash, of_epoch(caller.epoch).label("current")).where(of_key)
        row = (await connection.execute(query)).first()
    if row is None:
        return None
    if not row.current:  # disowned: the key is free again
        async with context.database.write() as connection:
            await connection.execute(
                update(requests).where(of_key, ~of_epoch(caller.epoch)).values(idempotency_key=None, body_hash=None)
            )
        return None
    if row.body_hash != retry.body_hash:
        raise Conflict("this Idempotency-Key was used for another request")
    return str(row.id)


def _row(
    caller: Caller, ask: Ask, graph_key: str, digest: str, method_key: str, retry: Retry | None, group_id: str | None
) -> dict[str, Any]:
    fixed = ask.problem.subject.fixed_bytes
    return {
        "id": new_id(),
        "tenant_id": caller.tenant_id,
        "graph_key": graph_key,
        "digest": digest,
        "budget_bytes": ask.problem.budget_bytes - fixed,
        "fixed_bytes": fixed,
        "method": ask.method,
        "method_key": method_key,
        "time_limit_s": ask.time_limit_s,
        "max_gap": ask.max_gap,
        "priority": ask.priority,
        "queue_limit_s": ask.queue_limit_s,
        "cache": "miss",
        "ended": False,
        "idempotency_key": None if retry is None else retry.key,
        "body_hash": None if retry is None else retry.body_hash,
        "group_id": group_id,
        "epoch": caller.epoch,
        "created_at": now(),
    }


async def _answer_infeasible(
    context: Context, caller: Caller, ask: Ask, retry: Retry | None, group_id: str | None
) -> str:
    """The budget does not cover the fixed bytes: infeasible without a look at the store."""
    subject = ask.problem.subject
    least, who = await asyncio.to_thread(least_need, subject)
    digest = problem_digest(ask.problem)
    row = _row(caller, ask, "", digest, ask.method, retry, group_id)
    answer = Answer(
        Status.INFEASIBLE,
        ask.method,
        ask.problem.budget_bytes,
        least_budget_bound_bytes=least,
        digest=digest,
        message=f"No plan fits: {who} alone needs {least} bytes, and the budget is {ask.problem.budget_bytes}.",
        id=row["id"],
        cache="hit",
    )
    row |= {"cache": "hit", "ended": True, "ended_at": row["created_at"], "answer": answer.to_json()}
    async with context.database.write() as connection:
        await connection.execute(requests.insert().values(row))
    context.metrics.cache.labels("hit").inc()
    return str(row["id"])


async def _answer_from_store(
    context: Context, caller: Caller, ask: Ask, net: Problem, keys: Keys, known: Known, snapshot: Snapshot,
    retry: Retry | None, group_id: str | None,
) -> str:  # fmt: skip
    result = "near" if known.carried else "hit"
    answer = answer_of(known, net, ask.method, ask.max_gap, keys.digest)
    row = _row(caller, ask, keys.graph, keys.digest, keys.method, retry, group_id)
    row |= {
        "cache": result,
        "ended": True,
        "ended_at": row["created_at"],
        "plan_id": None if known.plan is None else known.plan.id,
        "answer": document(answer, row["fixed_bytes"], id=row["id"], cache=result),
    }
    async with context.database.write() as connection:
        if known.effort is None:  # an answer put together from other budgets or costs: name this problem too
            await context.store.put_graph(connection, keys, net)
            row["plan_id"] = await _keep_near(context, connection, keys, net, known) or row["plan_id"]
        elif known.near is not None and known.uses_near:
            row["plan_id"] = await _keep_near(context, connection, keys, net, known)
        await connection.execute(requests.insert().values(row))
        await context.store.touch(connection, keys.graph, row["plan_id"])
    if ask.body and result == "hit":
        context.response_cache.put(caller, ask.body, keys, row, known.plan, snapshot)
    context.metrics.cache.labels(result).inc()
    return str(row["id"])


async def _keep_near(
    context: Context, connection: AsyncConnection, keys: Keys, net: Problem, known: Known
) -> str | None:
    """Store what was carried over from a graph with other costs: it is proved for this one too."""
    if known.bound_ns is not None:
        await context.store.raise_bound(connection, keys.graph, net.budget_bytes, known.bound_ns)
    if known.least_bytes is not None:
        await context.store.raise_floor(connection, keys.graph, known.least_bytes, known.enough_bytes)
    if known.near is None or not known.uses_near:
        return None
    plan, verdict = known.near
    plan_id, digest = await context.store.put_plan(connection, keys.graph, keys.method, "near", plan, verdict)
    context.verifier.remember(keys.graph, digest, verdict)
    return plan_id


async def _join_flight(
    context: Context, caller: Caller, ask: Ask, keys: Keys, retry: Retry | None, group_id: str | None
) -> str | None:
    """Join the solve under way; None where it has just ended, so that what it found is in the store."""
    row = _row(caller, ask, keys.graph, keys.digest, keys.method, retry, group_id)
    async with context.database.write() as connection:
        solve_id = await _join(connection, keys.flight, ask)
        if solve_id is None:
            return None
        await connection.execute(requests.insert().values(row | {"solve_id": solve_id, "cache": "joined"}))
    context.metrics.cache.labels("joined").inc()
    context.notifier.notify(solve_id)
    return str(row["id"])


async def _queue(
    context: Context, caller: Caller, ask: Ask, net: Problem, keys: Keys, known: Known, start_plan_id: str | None,
    retry: Retry | None, group_id: str | None,
) -> str:  # fmt: skip
    if context.stopping:
        raise Unavailable("the service is stopping; ask again in a moment", retry_after_s=5)
    row = _row(caller, ask, keys.graph, keys.digest, keys.method, retry, group_id)
    async with context.database.write() as connection:
        solve_id = await _join(connection, keys.flight, ask)
        joined = solve_id is not None
        if solve_id is None:
            await _check_capacity(context, connection, caller)
            await context.store.put_graph(connection, keys, net)
            await _keep_near(context, connection, keys, net, known)
            solve_id = await _new_solve(context, connection, caller, ask, net, keys, start_plan_id)
            if solve_id is None:  # another came first
                solve_id, joined = await _join(connection, keys.flight, ask), True
        if solve_id is None:
            raise Conflict("this problem was asked for and ended at the same moment; ask again", retry_after_s=1)
        row |= {"solve_id": solve_id, "cache": "joined" if joined else "near" if known.carried else "miss"}
        await connection.execute(requests.insert().values(row))
        if not joined:
            await context.enqueue(connection, solve_id, ask.priority)
    context.metrics.cache.labels(row["cache"]).inc()
    context.notifier.notify("queue" if not joined else solve_id)
    return str(row["id"])


async def _join(connection: AsyncConnection, flight_key: str, ask: Ask) -> str | None:
    """The solve of this flight, locked so that it can't end before the request is written; urgency is inherited."""
    query = select(solves.c.id, solves.c.priority).where(solves.c.flight_key == flight_key, ACTIVE).with_for_update()
    row = (await connection.execute(query)).first()
    if row is None:
        return None
    if row.priority < ask.priority:
        await connection.execute(update(solves).where(solves.c.id == row.id).values(priority=ask.priority))
    return str(row.id)


async def _new_solve(
    context: Context, connection: AsyncConnection, caller: Caller, ask: Ask, net: Problem, keys: Keys, start: str | None
) -> str | None:
    insert = (
        context.database.insert(solves)
        .values(
            id=new_id(),
            tenant_id=caller.tenant_id,
            flight_key=keys.flight,
            graph_key=keys.graph,
            budget_bytes=net.budget_bytes,
            fixed_bytes=ask.problem.subject.fixed_bytes,
            method=ask.method,
            method_key=keys.method,
            options=ask.options,
            start_plan_id=start,
            forced=ask.force,
            state=_QUEUED,
            priority=ask.priority,
            queued_at=now(),
        )
        .on_conflict_do_nothing()
        .returning(solves.c.id)
    )
    solve_id: str | None = await connection.scalar(insert)
    return solve_id


async def _check_capacity(context: Context, connection: AsyncConnection, caller: Caller) -> None:
    waiting = await connection.scalar(select(func.count()).select_from(solves).where(solves.c.state == _QUEUED))
    if (waiting or 0) >= context.settings.most_queued:
        raise Unavailable("the queue is full", retry_after_s=30)
    await check_quota(connection, caller)
