"""A request comes in: it is answered from the store, joined to a solve under way, or queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import structlog
from sqlalchemy import and_, bindparam, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Problem, problem_digest, readable
from remat_ir.proof import certifiable
from remat_solver import Ending, Known, checked, least_need, pair_proof

from ..context import COME_BACK_S, Context
from ..errors import Conflict, Invalid, NotFound, RateLimited, Unavailable
from ..identity import ID, Caller, Keys, Retry, keys_of, method_key_of
from ..storage.answers import CachedResponse, Stored, document
from ..storage.tables import ACTIVE, of_epoch, requests, solves, tenants
from ..telemetry import traceparent
from ..tenants.quotas import check_quota
from .parse import Ask
from .read import find_request, queued_answer

_OF_FLIGHT = (
    select(solves.c.id, solves.c.tenant_id, solves.c.priority)
    .where(solves.c.flight_key == bindparam("flight"), ACTIVE)
    .with_for_update()
)
_INSERT = requests.insert()


async def start_plan(context: Context, caller: Caller, ask: Ask, net: Problem, keys: Keys) -> str | None:
    """The plan of the solve that was named as a start, verified on this problem and kept under it: its id.

    Raises:
        Invalid: there is no such plan, or it is not valid for this problem.
    """
    start = ask.start or ""
    try:  # what is no id may hold what no database takes
        plan_id = (await find_request(context, caller, start)).plan_id if ID.fullmatch(start) else None
    except NotFound:
        plan_id = None
    plan_row = None if plan_id is None else await context.store.plan(plan_id)
    if plan_row is None:
        raise Invalid("start names no ended solve of yours that has a plan", "/start")
    plan = await context.verifier.read_plan(plan_row.data)
    if plan is None:
        raise Invalid("the plan of start is damaged; solve it anew", "/start")
    try:
        verdict = await context.verifier.verify(net, plan)
    except Exception as error:  # noqa: BLE001 – a plan of a caller may fail in any way
        raise Invalid(f"the plan of start is not valid for this problem: {error}", "/start") from None
    async with context.database.write(brief=True) as connection:
        await context.store.put_graph(connection, keys, ask.text, net.budget_bytes)
        return await context.store.put_plan(connection, keys.graph, keys.method, "start", plan, verdict)


class Taken(NamedTuple):
    """A request that was taken in.

    Attributes:
        answer: where that is at hand; then its row is on its way.
        waits: for a solve, so that it has not ended a moment ago.
        queued: the answer so far of one whose solve has just been queued.
    """

    id: str
    answer: bytes | None = None
    waits: bool = False
    queued: Callable[[], bytes] | None = None


@dataclass(frozen=True)
class Submission:
    """One POST on its way: found again by its idempotency key, looked up, answered, joined or queued.

    Attributes:
        retry: what makes a repeated POST the same one.
        group_id: the sweep that it is part of.
    """

    context: Context
    caller: Caller
    ask: Ask
    retry: Retry | None = None
    group_id: str | None = None

    async def submit(self) -> str:
        """Take the request in; returns its id. What it gets is there to read at once, or later.

        Raises:
            ServiceError: as `take`.
        """
        return (await self.take()).id

    async def take(self) -> Taken:
        """Take the request in, with its answer where that needs no further look.

        Raises:
            Conflict: the idempotency key was used with another body.
            Invalid: there is no such solve to start from.
            Unavailable: the queue is full.
            RateLimited: the tenant's quota is used up.
        """
        try:
            earlier = await self._earlier()
            return Taken(earlier) if earlier is not None else await self._answer_or_queue()
        except IntegrityError:  # the same request came twice at once, and the other was quicker
            earlier = await self._earlier()
            if earlier is None:
                raise
            return Taken(earlier)

    async def _earlier(self) -> str | None:
        """The request that came before under the same idempotency key."""
        context, caller, retry = self.context, self.caller, self.retry
        if retry is None:
            return None
        if context.write_behind.holds_key(caller.tenant_id, retry.key):
            await context.write_behind.flush()
        if not await context.store.has_idempotency_key(caller.tenant_id, retry.key):
            return None
        of_key = and_(requests.c.tenant_id == caller.tenant_id, requests.c.idempotency_key == retry.key)
        query = select(requests.c.id, requests.c.body_hash, of_epoch(caller.epoch).label("current")).where(of_key)
        row = await context.database.first(query)
        if row is None:
            return None
        if not row.current:  # disowned: the key is free again
            async with context.database.write(brief=True) as connection:
                await connection.execute(
                    update(requests).where(of_key, ~of_epoch(caller.epoch)).values(idempotency_key=None, body_hash=None)
                )
            return None
        if row.body_hash != retry.body_hash:
            raise Conflict("this Idempotency-Key was used for another request")
        return str(row.id)

    async def _answer_or_queue(self) -> Taken:
        context, ask, net, digests = self.context, self.ask, self.ask.net, self.ask.digests
        if net is None or digests is None:
            return Taken(await self._answer_infeasible())
        keys = keys_of(self.caller, digests, method_key_of(ask.method, ask.options, ask.start, ask.certify))
        snapshot, packed, near = await context.store.snapshot_with_graph(keys, net.budget_bytes)
        if snapshot.under_way:  # it has all that the store has, and more to come
            joined = await self._join_flight(keys)
            if joined is not None:
                return Taken(joined, waits=True)
            snapshot, packed, near = await context.store.snapshot_with_graph(keys, net.budget_bytes)
        if packed is not None:
            await self._mend_graph(keys, packed)
        within_s = context.settings.look_up_s
        known = Stored(net)
        if not ask.force:
            known = await context.cache.known(self.caller, keys, net, snapshot, within_s, near)
        if not ask.force and known.is_final(ask.max_gap, ask.time_limit_s):
            return await self._answer_from_store(keys, known)
        start_plan_id = None if ask.start is None else await start_plan(context, self.caller, ask, net, keys)
        return await self._queue(keys, known, start_plan_id, absent=packed is None)

    async def _mend_graph(self, keys: Keys, packed: bytes) -> None:
        """Replace the stored graph where its bytes are damaged: the POST carries it whole."""
        context = self.context
        if await context.verifier.graph(keys.graph, packed, self.caller.key, self.ask.text) is not None:
            return
        async with context.database.write(brief=True) as connection:
            await context.store.replace_graph(connection, keys, self.ask.text)
        context.metrics.mended.labels("graph").inc()

    def _row(self, graph_key: str, digest: str, method_key: str) -> dict[str, Any]:
        """The request's own row."""
        ask, fixed = self.ask, self.ask.problem.subject.fixed_bytes
        return {
            "id": self.context.clock.new_id(),
            "tenant_id": self.caller.tenant_id,
            "graph_key": graph_key,
            "digest": digest,
            "budget_bytes": ask.problem.budget_bytes - fixed,
            "fixed_bytes": fixed,
            "name": ask.name,
            "method": ask.method,
            "method_key": method_key,
            "time_limit_s": ask.time_limit_s,
            "max_gap": ask.max_gap,
            "priority": ask.priority,
            "queue_limit_s": ask.queue_limit_s,
            "cache": "miss",
            "ended": False,
            "idempotency_key": None if self.retry is None else self.retry.key,
            "body_hash": None if self.retry is None else self.retry.body_hash,
            "group_id": self.group_id,
            "epoch": self.caller.epoch,
            "created_at": self.context.clock.now(),
        }

    async def _answer_infeasible(self) -> str:
        """The budget does not cover the fixed bytes: infeasible without a look at the store."""
        ask, subject = self.ask, self.ask.problem.subject
        least, who = await asyncio.to_thread(least_need, subject)
        digest = problem_digest(ask.problem)
        row = self._row("", digest, ask.method)
        known = Known(ask.problem, infeasible=True).needing(least)
        reason = (
            f"No plan fits: {who} alone needs {readable(least)}; the budget is {readable(ask.problem.budget_bytes)}."
        )
        answer = known.answer(ask.method, ending=Ending(reason=reason), digest=digest)
        answer = replace(answer, id=row["id"], cache="hit", proof=None)
        if certifiable(subject) and ask.certify:  # it names one op, so it needs no row of its own
            proof = await asyncio.to_thread(pair_proof, replace(ask.problem, budget_bytes=least - 1))
            answer = replace(answer, proof=proof)
        answer = checked(ask.problem, answer)
        row |= {"cache": "hit", "ended": True, "ended_at": row["created_at"], "answer": answer.to_json()}
        async with self.context.database.write(brief=True) as connection:
            await connection.execute(_INSERT, self.context.seals.sealed("requests", row))
        self.context.metrics.cache.labels("hit").inc()
        return str(row["id"])

    async def _answer_from_store(self, keys: Keys, known: Stored) -> Taken:
        context, budget, result = self.context, known.problem.budget_bytes, known.source
        answer = known.answer(self.ask.method, self.ask.max_gap, keys.digest)
        proof, proof_id = known.certificate(answer.restricted_to)
        row = self._row(keys.graph, keys.digest, keys.method)
        row |= {
            "cache": result,
            "ended": True,
            "ended_at": row["created_at"],
            "plan_id": None if known.plan is None else known.plan.id,
            "proof_id": proof_id,
            "answer": document(answer, row["fixed_bytes"], id=row["id"], cache=result),
        }
        at_hand = proof is None or proof_id is not None
        if result == "hit" and known.effort is not None and not known.uses_near and at_hand:
            text = await self._answer_from_memory(keys, known, row)
            if text is not None:
                return Taken(row["id"], text)
        async with context.database.write(brief=True) as connection:
            if known.effort is None:  # an answer put together from other budgets or costs: name this problem too
                await context.store.put_graph(connection, keys, self.ask.text, budget)
            row["plan_id"] = await self._keep_near(connection, keys, known) or row["plan_id"]
            if proof is not None and proof_id is None:
                row["proof_id"] = await context.store.put_proof(connection, keys.graph, budget, proof)
            row = context.seals.sealed("requests", row)
            await connection.execute(_INSERT, row)
            await context.store.touch(connection, keys.graph, row["plan_id"])
        await self._remember(keys, known, row)
        context.metrics.cache.labels(result).inc()
        context.metrics.saved_seconds.labels(self.caller.tenant).inc(row["answer"]["seconds"])
        if known.snapshot is not None:
            context.metrics.saved_bytes.labels(self.caller.tenant).inc(known.snapshot.saved_bytes)
        return Taken(row["id"])

    async def _answer_from_memory(self, keys: Keys, known: Stored, row: dict[str, Any]) -> bytes | None:
        """The answer as it will be given to the same body again, its row written a moment later; None: the long way."""
        held, cache = await self._remember(keys, known, row), self.context.response_cache
        if held is None or (self.retry is not None and await cache.came_before(self.caller, self.retry)):
            return None
        self.context.metrics.cache.labels("hit").inc()
        return await cache.give(self.caller, held, self.retry)

    async def _remember(self, keys: Keys, known: Stored, row: dict[str, Any]) -> CachedResponse | None:
        context = self.context
        if not self.ask.body or row["cache"] != "hit" or known.partial:
            return None
        plan, text = known.plan, None
        if plan is not None:
            text = await context.verifier.text(keys.graph, known.problem, plan.data, plan.claimed)
        return context.response_cache.put(self.caller, self.ask.body, keys, row, known, text)

    async def _keep_near(self, connection: AsyncConnection, keys: Keys, known: Stored) -> str | None:
        """Store what was carried over from a graph with other costs, and was checked for this one; the plan's id."""
        store, claim, budget = self.context.store, known.claim, known.problem.budget_bytes
        if not known.carried:
            return None
        if known.proof is not None:
            await store.put_proof(connection, keys.graph, budget, known.proof)
        elif claim is not None:
            await store.raise_bound(connection, keys.graph, budget, claim.bound_ns, claim.source or self.ask.method)
        if known.least_bytes is not None:
            await store.raise_floor(connection, keys.graph, known.least_bytes, known.enough_bytes)
        if known.near is None or not known.uses_near:
            return None
        return await store.put_plan(connection, keys.graph, keys.method, "near", *known.near)

    async def _join_flight(self, keys: Keys) -> str | None:
        """Join the solve under way; None where it has just ended, so that what it found is in the store."""
        context, row = self.context, self._row(keys.graph, keys.digest, keys.method)
        async with context.database.write(brief=True) as connection:
            solve_id = await self._join(connection, keys)
            if solve_id is None:
                return None
            await connection.execute(_INSERT, row | {"solve_id": solve_id, "cache": "joined"})
        self._wait(row)
        context.metrics.cache.labels("joined").inc()
        context.notifier.notify(solve_id)
        return str(row["id"])

    async def _queue(self, keys: Keys, known: Stored, start_plan_id: str | None, absent: bool) -> Taken:
        """Put a solve into the queue; `absent`: its graph is not in the store."""
        context = self.context
        if context.stopping:
            raise Unavailable("the service is stopping; ask again in a moment", retry_after_s=COME_BACK_S)
        row = self._row(keys.graph, keys.digest, keys.method)
        async with context.database.write(brief=True) as connection:
            told: dict[str, Any] | None = None
            try:
                await self._check_capacity(connection)
            except (RateLimited, Unavailable):  # a join costs nothing: the same may have been queued since the look
                solve_id = await self._join(connection, keys)
                if solve_id is None:
                    raise
            else:
                await context.store.put_graph(connection, keys, self.ask.text, known.problem.budget_bytes, absent)
                near_id = await self._keep_near(connection, keys, known)
                told = await self._new_solve(connection, keys, known, start_plan_id, near_id)
                solve_id = await self._join(connection, keys) if told is None else told["id"]  # another came first
            if solve_id is None:
                raise Conflict("this problem was asked for and ended at the same moment; ask again", retry_after_s=1)
            cache = "joined" if told is None else "near" if known.carried else "miss"
            row |= {"solve_id": solve_id, "cache": cache}
            await connection.execute(_INSERT, row)
        self._wait(row)
        context.metrics.cache.labels(cache).inc()
        context.notifier.notify(solve_id if told is None else "queue")
        return Taken(row["id"], waits=True, queued=None if told is None else partial(queued_answer, row, told))

    def _wait(self, row: dict[str, Any]) -> None:
        if row["queue_limit_s"] is not None:
            self.context.waits.begin(row["id"])

    async def _join(self, connection: AsyncConnection, keys: Keys) -> str | None:
        """The solve of this flight, locked so that it can't end before the request is written.

        A more urgent request of its own tenant makes it as urgent; another's orders nothing of this tenant's.
        """
        row = (await connection.execute(_OF_FLIGHT, {"flight": keys.flight})).first()
        if row is None:
            return None
        if row.priority < self.ask.priority and row.tenant_id == self.caller.tenant_id:
            await connection.execute(update(solves).where(solves.c.id == row.id).values(priority=self.ask.priority))
        return str(row.id)

    async def _new_solve(
        self, connection: AsyncConnection, keys: Keys, known: Stored, start_plan_id: str | None, near_id: str | None
    ) -> dict[str, Any] | None:
        """A row in the queue; the best plan that is stored is its first incumbent, which counts if its time ends.

        What the solve tells so far; None where another one of the same flight came first.
        """
        ask, net = self.ask, known.problem
        plan_id = near_id or (None if known.plan is None else known.plan.id)
        best = None if plan_id is None else known.known.verdict
        total_ns = net.subject.total_cost_ns
        told = {
            "id": self.context.clock.new_id(),
            "plan_id": plan_id,
            "cost_ns": None if best is None else best.cost_ns,
            "peak_bytes": None if best is None else best.peak_bytes,
            "total_cost_ns": total_ns,
            "bound_ns": None if best is None else total_ns,
            "restricted_to": "",
        }
        row = self.context.seals.sealed("solves", told) | {
            "tenant_id": self.caller.tenant_id,
            "flight_key": keys.flight,
            "graph_key": keys.graph,
            "budget_bytes": net.budget_bytes,
            "fixed_bytes": ask.problem.subject.fixed_bytes,
            "method": ask.method,
            "method_key": keys.method,
            "options": ask.options,
            "start_plan_id": start_plan_id,
            "forced": ask.force,
            "priority": ask.priority,
            "trace": traceparent(),
            "asked_by": structlog.contextvars.get_contextvars(),
        }
        return None if await self.context.queue.put(connection, row) is None else told

    async def _check_capacity(self, connection: AsyncConnection) -> None:
        if await self.context.queue.holds(connection, self.context.settings.most_queued):
            await self._check_share(connection)
        await check_quota(connection, self.caller, self.context.clock.now())

    async def _check_share(self, connection: AsyncConnection) -> None:
        """A full queue refuses those who fill their share of it by weight, and nobody else for them."""
        mine = solves.c.tenant_id == self.caller.tenant_id
        queued = select(func.count()).select_from(solves).where(mine, solves.c.state == "queued")
        weight = select(tenants.c.weight).where(tenants.c.id == self.caller.tenant_id)
        of_all = select(func.sum(tenants.c.weight)).where(~tenants.c.disabled)
        share = await connection.scalar(select(weight.scalar_subquery() / of_all.scalar_subquery()))
        if (await connection.scalar(queued) or 0) >= self.context.settings.most_queued * (share or 0.0):
            raise Unavailable("the queue is full", retry_after_s=30)
