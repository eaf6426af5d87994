"""A claimed solve from claim to end, whoever dispatches it: `execute` is the only way in which anything is solved.

It runs in rounds of a solver child, each improvement written down before anybody hears of it. Each round starts from
the stored incumbent and bound, with the time and gap that the open requests still ask for; requests that join may ask
for another round.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from remat_ir import Answer, Status, gap_of, plain_peak
from remat_ir.proof import certifiable
from remat_solver import Ending

from ..context import Context
from ..identity import gross_of
from ..processes.supervisor import Child, ChildRun
from ..requests.completion import end_request, write_answers
from ..storage.answers import Stored
from ..storage.database import Outage, first_line, is_outage
from ..storage.queue import Claimed, LostClaim
from ..storage.seals import Effort, column
from ..storage.tables import requests
from ..storage.verifier import unpack
from ..telemetry import ASKED_BY, span
from .record import Claim, Outcome, SolveRecord, give_back, open_requests, read_claim

log = structlog.get_logger("remat_service.solving.run")

_LIMITS = requests.c.id, requests.c.time_limit_s, requests.c.max_gap
_TICK_S = 0.5
_PAUSE_S = 0.1  # between a change and the look: many that join at once cost one look
NEARLY_S = 0.05  # a solver that stops this short of its limit has used it

_MOST_NAMED = 20  # requests that the last line of a solve names; thousands may have joined
_TOO_OFTEN = "The solver was started too often without coming to an end."


class SolveRun:
    """A claimed solve: rounds of a solver child, each improvement written down before anybody hears of it."""

    def __init__(self, context: Context, claim: Claim) -> None:
        self.context, self.claim = context, claim
        self.record = SolveRecord(context, claim)
        self.failures = 0
        self.look_s: float | None = None
        self.answered: list[str] = []
        self._child: Child | None = None

    async def run(self) -> Answer | None:
        """Rounds until no request is open; returns the last outcome, in net bytes. Signs of life go on throughout.

        Raises:
            LostClaim: the solve is somebody else's.
        """
        beating = asyncio.create_task(self._beat())
        try:
            return await self._rounds()
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _beat(self) -> None:
        outage = Outage(log, "signs of life", LostClaim, solve=self.claim.id)
        try:
            while True:
                await asyncio.sleep(self.context.settings.heartbeat_s)
                with outage:
                    await self.context.queue.beat(self.claim, self.record.spent())
        except LostClaim:
            self.record.lost = True
            if self._child is not None:
                self._child.signal(signal.SIGKILL)

    async def _rounds(self) -> Answer | None:
        outcome: Answer | None = None
        if self.claim.attempt > self.context.settings.most_attempts:
            failed = Answer(Status.FAILED, self.claim.row.method, self.claim.net.budget_bytes, message=_TOO_OFTEN)
            outcome, known = await self._best_of(failed, 0.0)
            self.record.spent_s = self.context.settings.most_time_limit_s
            await self._settle(outcome, known)
            return outcome
        while True:
            async with self.context.database.read(brief=True) as connection:
                waiting = await open_requests(connection, self.claim.id)
            if not waiting:
                if await self._end_unwanted():
                    return outcome
                continue
            limit = max(request.time_limit_s for request in waiting)
            gap = min(request.max_gap for request in waiting)
            fresh = self.claim.row.forced and self.record.spent_s == 0
            self.look_s = max(limit, self.context.settings.look_up_s)
            known = Stored(self.claim.net, certify=self.claim.keys.certify) if fresh else await self._looked_up()
            left = limit - self.record.spent_s
            found = not fresh and known.is_final(gap, limit)
            final = found or left <= NEARLY_S
            if final:
                outcome = known.answer(self.claim.row.method, gap, waiting[0].digest)
                if outcome.status is Status.NOTHING_FOUND and left <= NEARLY_S:
                    outcome = replace(outcome, limit="time", message="")
            else:
                outcome, known = await self._round(waiting[0].digest, left, gap, known)
            # nothing was solved where the look at a POST was too short for what this one has found
            source = known.source if found and self.record.spent_s == 0 else None
            if await self._settle(outcome, known, waiting if final else (), source):
                self._observe(outcome)
                return outcome

    async def _looked_up(self) -> Stored:
        claim = self.claim
        return await self.context.cache.known(claim.caller, claim.keys, claim.net, within_s=self.look_s)

    async def _round(self, digest: str, limit_s: float, gap: float, known: Stored) -> tuple[Answer, Stored]:
        """One solver child; what it finds and proves is stored, also when it has to be killed."""
        context, claim = self.context, self.claim
        begun = context.clock.monotonic()
        child = self._child = await context.supervisor.start_child(limit_s)
        run = ChildRun(child, context.settings, context.clock, limit_s)
        plain = None  # replayed once a graph, while the child solves
        if known.snapshot is None or known.snapshot.plain_bytes is None:
            plain = asyncio.create_task(asyncio.to_thread(plain_peak, claim.net.subject))
        self.record.begin()
        outcome = Outcome(claim.net, claim.row.method, digest, claim.row.fixed_bytes)
        watching = asyncio.create_task(self._watch(run, limit_s, gap))
        try:
            async with contextlib.aclosing(run.frames(await self._job(limit_s, gap, known))) as frames:
                async for frame in frames:
                    if self.record.lost:
                        break
                    await self.record.take(outcome, frame)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            child.signal(signal.SIGKILL)
        if self.record.lost:
            raise LostClaim
        elapsed = self.record.end()
        solving = elapsed if outcome.answer is None else min(elapsed, outcome.answer.seconds)  # as the child says
        context.metrics.overhead_seconds.observe(max(0.0, context.clock.monotonic() - begun - solving))
        if run.reason is not None:
            context.metrics.kills.labels(run.reason).inc()
        plain_bytes = None if plain is None else await plain
        return await self._store(outcome, run, limit_s - elapsed, gap, known, plain_bytes)

    async def _watch(self, run: ChildRun, limit_s: float, gap: float) -> None:
        """Look at the open requests whenever something about the solve has changed, and now and then, for ever."""
        outage = Outage(log, "looking at the open requests", LostClaim, solve=self.claim.id)
        try:
            with self.context.notifier.subscribe(self.claim.id) as changes:
                while True:
                    await changes.wait(_TICK_S)
                    await asyncio.sleep(_PAUSE_S)
                    changes.reset()
                    with outage:
                        await self._review(run, limit_s, gap)
        except LostClaim:
            run.child.signal(signal.SIGKILL)

    async def _review(self, run: ChildRun, limit_s: float, least_gap: float) -> None:
        """End requests that want no more than there is by now; stop the child when nobody wants anything."""
        context, claim, record = self.context, self.claim, self.record
        async with context.database.read(brief=True) as connection:
            waiting = await open_requests(connection, claim.id, *_LIMITS)
        spent, whole = record.spent(), record.spent_s + limit_s
        cost, bound = record.cost_ns, record.bound_ns
        gap = None if cost is None or bound is None else gap_of(cost, bound)
        due: list[tuple[str, str]] = []
        for request in waiting:
            if gap is not None and gap <= request.max_gap and request.max_gap > least_gap:
                due.append((request.id, "gap"))
            elif spent >= request.time_limit_s and request.time_limit_s < whole - NEARLY_S:
                due.append((request.id, "time"))
        if due:
            async with context.database.write(brief=True) as connection:
                await record.write(connection, {"spent_s": spent})
                for request_id, limit in due:
                    status = Status.NOTHING_FOUND if cost is None else Status.FEASIBLE
                    await end_request(context, connection, request_id, status, limit)
            context.notifier.notify(*(request_id for request_id, _ in due))
        if len(due) == len(waiting):
            await run.cancel()

    async def _job(self, limit_s: float, gap: float, known: Stored) -> dict[str, Any]:
        claim = self.claim
        plan_row = known.plan
        if claim.row.start_plan_id is not None and plan_row is None:
            plan_row = await self.context.store.plan(claim.row.start_plan_id)
        plan = None
        if plan_row is not None and plan_row.peak_bytes <= claim.net.budget_bytes:
            plan = await self.context.verifier.plan(plan_row.graph_key, claim.net, plan_row.data, plan_row.claimed)
        gross = gross_of(claim.net, claim.row.fixed_bytes)
        certifies = claim.keys.certify and certifiable(claim.net.subject)  # then a claim counts for nothing
        return {
            "problem": await asyncio.to_thread(gross.to_json),
            "method": claim.row.method,
            "options": claim.row.options,
            "time_limit_s": limit_s,
            "max_gap": gap,
            "start": None if plan is None else await asyncio.to_thread(plan.to_json),
            "bound_ns": None if known.claim is None or certifies else known.claim.bound_ns,
            "proof": None if known.proof is None else await asyncio.to_thread(unpack, known.proof.data),
            "certify": claim.keys.certify,
        }

    async def _store(
        self, outcome: Outcome, run: ChildRun, left_s: float, gap: float, known: Stored, plain_bytes: int | None
    ) -> tuple[Answer, Stored]:
        """What a round leaves behind: its claims, how it ended, and its answer in net bytes."""
        context, claim = self.context, self.claim
        graph_key, budget = claim.row.graph_key, claim.net.budget_bytes
        out_of_time = left_s <= NEARLY_S
        crashed = outcome.answer is None and run.reason is None
        if crashed:
            self.failures += 1
            again = outcome.kind is None and self.failures < context.settings.most_attempts
            async with context.database.read(brief=True) as connection:
                wanted = again and await open_requests(connection, claim.id)
            if wanted:
                log.warning("solver child died; starting another", solve=claim.id, status=run.child.status)
                return replace(outcome.partial("time"), limit="again"), known
        answer = outcome.final(run.reason, out_of_time)
        async with context.database.write(brief=True) as connection:
            await self.record.write(connection, {"spent_s": self.record.spent_s})
            await context.cache.clear(connection, claim.keys, known)
            if plain_bytes is not None:
                await context.store.put_plain_peak(connection, graph_key, plain_bytes)
            if outcome.claim is not None:
                await context.store.raise_bound(connection, graph_key, budget, *outcome.claim)
            if answer.bound_ns is not None and answer.restricted_to:
                source = answer.claimed_by or claim.row.method
                await context.store.raise_bound(
                    connection, graph_key, budget, answer.bound_ns, source, claim.row.method_key, answer.restricted_to
                )
            if answer.least_budget_bound_bytes is not None or answer.least_budget_bytes is not None:
                least = answer.least_budget_bound_bytes or 0
                if answer.status is Status.INFEASIBLE:
                    least = max(least, budget + 1)
                await context.store.raise_floor(connection, graph_key, least, answer.least_budget_bytes)
            if answer.status not in (Status.FAILED, Status.CANCELLED):
                message = answer.message if not answer.budget_bytes or claim.row.fixed_bytes == 0 else ""
                await context.store.put_effort(
                    connection,
                    graph_key,
                    budget,
                    claim.row.method_key,
                    Effort(
                        float(self.record.spent_s + (max(0.0, left_s) if out_of_time else 0.0)),
                        outcome.answer is not None and outcome.answer.ran_to_its_end,
                        answer.status.value,
                        answer.limit,
                        column(answer.restricted_to),
                        message,
                    ),
                )
        return await self._best_of(answer, gap)

    async def _best_of(self, answer: Answer, gap: float) -> tuple[Answer, Stored]:
        """An answer with the best that the store knows: bounds from other budgets, an earlier incumbent; and that."""
        stored = await self._looked_up()
        known = stored.known
        if known.cost_ns is None or stored.plan is None:
            least, enough = known.least_bytes, known.enough_bytes
            answer = replace(answer, least_budget_bytes=enough, least_budget_bound_bytes=least)
            return stored.with_claims(answer), stored
        ending = Ending(answer.limit)
        best = known.answer(answer.method, gap, ending, seconds=answer.seconds, digest=answer.digest)
        same = (best.cost_ns, best.bound_ns) == (answer.cost_ns, answer.bound_ns)
        said = replace(
            best,
            message=answer.message if same else "",
            chain_cost_ns=answer.chain_cost_ns,
            dropped_methods=answer.dropped_methods,
        )
        return stored.with_claims(said), stored

    async def _settle(
        self, outcome: Answer, known: Stored, ended: Sequence[Any] = (), source: str | None = None
    ) -> bool:
        """End every request that the outcome satisfies; True when none is left and the solve has ended too.

        Args:
            ended: requests for which nothing more is to come, whatever the outcome says.
            source: where in the store the answer is from; None: it was solved.
        """
        all_told = {request.id for request in ended}
        context, claim = self.context, self.claim
        plan = None if outcome.cost_ns is None else known.plan
        if outcome.limit == "again":
            return False
        endings: list[tuple[Any, Answer]] = []
        async with context.database.write(brief=True) as connection:
            # locks the row: nobody joins from here on
            await self.record.write(connection, {"spent_s": self.record.spent_s})
            waiting = await open_requests(connection, claim.id)
            for request in waiting:
                if request.id in all_told or self._satisfied(request, outcome):
                    said = replace(outcome, digest=request.digest, seconds=round(self.record.spent_s, 3))
                    if request.fixed_bytes != claim.row.fixed_bytes:
                        said = replace(said, message="")
                    endings.append((request, said))
            proof, proof_id = known.certificate(outcome.restricted_to)
            if proof is not None and proof_id is None:
                key, budget = claim.row.graph_key, claim.net.budget_bytes
                proof_id = await context.store.put_proof(connection, key, budget, proof)
            await write_answers(context, connection, endings, None if plan is None else plan.id, proof_id, source)
            finished = len(endings) == len(waiting)
            if finished:
                await self.record.write(
                    connection,
                    {"state": "ended", "ended_at": context.clock.now(), "outcome": outcome.to_json(), "worker": None},
                )
        if plan is not None and context.settings.embedded:  # for the crowd that is about to be woken
            await context.verifier.text(claim.row.graph_key, claim.net, plan.data, plan.claimed)
        self.answered += [request.id for request, _ in endings]
        if plan is not None and known.snapshot is not None:
            context.metrics.saved_bytes.labels(claim.caller.tenant).inc(len(endings) * known.snapshot.saved_bytes)
        context.notifier.notify(*(request.id for request, _ in endings))
        if finished:
            context.notifier.notify(claim.id)
        return finished

    def _satisfied(self, request: Any, outcome: Answer) -> bool:
        if outcome.ran_to_its_end or outcome.status is Status.FAILED or outcome.limit == "memory":
            return True
        cost, claimed = outcome.cost_ns, outcome.claimed_bound_ns
        if outcome.limit is None and cost is not None and claimed is not None:
            # it ended since the claim was enough and could not be certified: once more would end the same way
            return gap_of(cost, claimed) <= float(request.max_gap)
        if outcome.gap is not None and outcome.gap <= request.max_gap:
            return True
        wanted: float = min(request.time_limit_s, self.context.settings.most_time_limit_s)
        return self.record.spent_s + NEARLY_S >= wanted

    async def _end_unwanted(self) -> bool:
        async with self.context.database.write(brief=True) as connection:
            await self.record.write(connection, {"spent_s": self.record.spent_s})
            wanted = bool(await open_requests(connection, self.claim.id))
            if not wanted:
                await self.record.write(
                    connection, {"state": "ended", "ended_at": self.context.clock.now(), "worker": None}
                )
        self.context.notifier.notify(self.claim.id)
        return not wanted

    def _observe(self, outcome: Answer) -> None:
        metrics = self.context.metrics
        metrics.solve_seconds.labels(outcome.method, outcome.status.value).observe(self.record.spent_s)
        if outcome.gap is not None:
            metrics.gap.observe(outcome.gap)


async def execute(context: Context, claimed: Claimed) -> None:
    """See a claimed solve to its end, or give it back."""
    row = claimed.row
    context.metrics.queue_seconds.observe(claimed.queued_s)
    context.metrics.running.inc()
    logger = log.bind(solve=claimed.id, attempt=claimed.attempt, method=row.method)
    begun = context.clock.monotonic()
    tenant = ""
    try:
        asked_by = row.asked_by if isinstance(row.asked_by, dict) else {}  # null of servers of the version before
        structlog.contextvars.bind_contextvars(**{n: asked_by[n] for n in ASKED_BY if n in asked_by})
        about = {"remat.solve": claimed.id, "remat.method": row.method, "remat.attempt": claimed.attempt}
        claim = await read_claim(context, claimed)
        if claim is None:
            return
        tenant = claim.caller.tenant
        structlog.contextvars.bind_contextvars(tenant=tenant)
        logger.info("solve started", queued_s=round(claimed.queued_s, 3))
        with span("solve", row.trace, about) as note:
            run = SolveRun(context, claim)
            outcome = await run.run()
            if outcome is not None:
                note("remat.status", outcome.status.value)
        if outcome is not None:
            logger.info(
                "solve ended",
                status=outcome.status.value,
                gap=outcome.gap,
                requests=run.answered[:_MOST_NAMED],
                answered=len(run.answered),
                seconds=round(context.clock.monotonic() - begun, 3),
            )
    except LostClaim:
        logger.warning("solve taken over by another worker")
    except asyncio.CancelledError:
        await asyncio.shield(give_back(context, claimed))
        logger.info("solve given back to the queue")
        raise
    except Exception as error:
        if is_outage(error):
            logger.warning("solve broke off; it will be taken up again", error=first_line(error))
        else:
            logger.exception("solve broke off; it will be taken up again")
        await give_back(context, claimed, context.settings.stale_after_s)
    finally:
        seconds = context.clock.monotonic() - begun
        context.queue.turns.spend(row.tenant_id, seconds)
        context.metrics.tenant_seconds.labels(tenant).inc(seconds)
        context.metrics.running.dec()
