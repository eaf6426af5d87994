"""A claimed solve in rounds of a solver child, each improvement written down before anybody hears of it.

Each round starts from the stored incumbent and bound, with the time and gap that the open requests still ask for;
requests that join may ask for another round.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, InvalidData, InvalidPlan, Status, gap_of, overhead_of, read_plan

from .bells import heard
from .cache import Known, answer_of, best_bound, is_final
from .claim import Claim, LostClaim, open_requests
from .endings import end_request, write_ending
from .outcome import Outcome
from .room import Room
from .store import Effort, column
from .subjects import gross_of
from .tables import events, now, solves
from .warden import Run

log = structlog.get_logger("remat_service.rounds")

_TICK_S = 0.5
_NEARLY_S = 0.05  # a solver that stops this short of its limit has used it


class Rounds:
    """A claimed solve: rounds of a solver child, each improvement written down before anybody hears of it."""

    def __init__(self, room: Room, claim: Claim) -> None:
        self.room, self.claim = room, claim
        self.spent_s: float = claim.row.spent_s
        self.round_limit_s = 0.0
        self.round_gap = 0.0
        self.round_began: float | None = None
        self.cost_ns: int | None = claim.row.cost_ns
        self.bound_ns: int | None = claim.row.bound_ns
        self.seq: int | None = None
        self.run_now: Run | None = None
        self.lost = False
        self.failures = 0

    async def run(self) -> Answer | None:
        """Rounds until no request is open; returns the last outcome, in net bytes."""
        outcome: Answer | None = None
        if self.claim.attempt > self.room.settings.most_attempts:
            outcome = await self._known_outcome("The solver was started too often without coming to an end.")
            await self._end_all(outcome)
            return outcome
        while True:
            async with self.room.database.read() as connection:
                waiting = await open_requests(connection, self.claim.id)
            if not waiting:
                if await self._end_unwanted():
                    return outcome
                continue
            limit = max(request.time_limit_s for request in waiting)
            gap = min(request.max_gap for request in waiting)
            fresh = self.claim.row.forced and self.spent_s == 0
            known = (
                Known() if fresh else await self.room.cache.known(self.claim.caller, self.claim.keys, self.claim.net)
            )
            left = limit - self.spent_s
            if left <= _NEARLY_S or (not fresh and is_final(known, self.claim.net, gap, limit)):
                outcome = answer_of(known, self.claim.net, self.claim.row.method, gap, waiting[0].digest)
                if outcome.status is Status.NOTHING_FOUND and left <= _NEARLY_S:
                    outcome = replace(outcome, limit="time", message="")
            else:
                outcome = await self._round(waiting[0].digest, left, gap, known)
            if await self._settle(outcome):
                self._observe(outcome)
                return outcome

    async def _round(self, digest: str, limit_s: float, gap: float, known: Known) -> Answer:
        """One solver child; what it finds and proves is stored, also when it has to be killed."""
        room, claim = self.room, self.claim
        born = time.monotonic()
        child = await room.warden.child(limit_s)
        self.run_now = run = Run(child, room.settings, limit_s)
        self.round_began, self.round_limit_s, self.round_gap = time.monotonic(), limit_s, gap
        outcome = Outcome(claim.net, claim.row.method, digest, claim.row.fixed_bytes)
        ticker = asyncio.create_task(self._tick())
        try:
            async for frame in run.frames(await self._job(limit_s, gap, known)):
                if self.lost:
                    break
                await self._take(outcome, frame)
        finally:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker
            if self.run_now is run:
                child.signal(signal.SIGKILL)
            self.run_now = None
        if self.lost:
            raise LostClaim
        elapsed = time.monotonic() - self.round_began
        self.round_began = None
        room.metrics.overhead_seconds.observe(max(0.0, time.monotonic() - born - outcome.solver_seconds(elapsed)))
        self.spent_s += elapsed
        if run.reason is not None:
            room.metrics.kills.labels(run.reason).inc()
        return await self._store(outcome, run, elapsed)

    async def _job(self, limit_s: float, gap: float, known: Known) -> dict[str, Any]:
        claim = self.claim
        plan_row = known.plan
        if claim.row.start_plan_id is not None and plan_row is None:
            async with self.room.database.read() as connection:
                plan_row = await self.room.store.plan(connection, claim.row.start_plan_id)
        plan = None
        if plan_row is not None and plan_row.peak_bytes <= claim.net.budget_bytes:
            plan = await self.room.judge.plan(plan_row.graph_key, claim.net, plan_row.data, plan_row.claimed)
        gross = gross_of(claim.net, claim.row.fixed_bytes)
        return {
            "problem": await asyncio.to_thread(gross.to_json),
            "method": claim.row.method,
            "options": claim.row.options,
            "time_limit_s": limit_s,
            "max_gap": gap,
            "start": None if plan is None else await asyncio.to_thread(plan.to_json),
            "bound_ns": known.bound_ns,
        }

    async def _take(self, outcome: Outcome, frame: dict[str, Any]) -> None:
        """A frame from the child: judged, then stored, then told."""
        room, claim = self.room, self.claim
        if frame["type"] == "error":
            outcome.failed(frame["kind"], frame["message"])
            return
        if frame["type"] == "answer":
            frame_plan = frame["answer"].get("plan")
            outcome.ended(frame["answer"], frame["whole_bound_ns"])
        else:
            frame_plan = frame["plan"]
            outcome.proved(frame["whole_bound_ns"])
        better = None
        if frame_plan is not None:
            better = await self._judged(frame_plan, frame)
        if frame["type"] == "answer" and better is None:
            return
        bound, within = self._bound_of(frame)
        if better is None and bound == self.bound_ns:
            return
        async with room.database.write() as connection:
            values: dict[str, Any] = {"bound_ns": bound, "restricted_to": column(within)}
            if better is not None:
                plan, verdict, source = better
                plan_id, digest = await room.store.put_plan(
                    connection, claim.row.graph_key, claim.row.method_key, source, plan, verdict
                )
                room.judge.remember(claim.row.graph_key, digest, verdict)
                if self.cost_ns is None or verdict.cost_ns <= self.cost_ns:
                    values |= {"plan_id": plan_id, "cost_ns": verdict.cost_ns}
                    self.cost_ns = verdict.cost_ns
            if outcome.whole_bound_ns is not None:
                await room.store.raise_bound(
                    connection, claim.row.graph_key, claim.net.budget_bytes, outcome.whole_bound_ns
                )
            await self._write(connection, values)
            await self._event(connection, frame, bound, within)
        self.bound_ns = bound
        room.bells.ring(claim.id)

    async def _judged(self, data: object, frame: dict[str, Any]) -> Any:
        try:
            plan = await asyncio.to_thread(read_plan, data)
            verdict = await self.room.judge.admit(self.claim.net, plan)
        except (InvalidData, InvalidPlan) as error:
            self.room.metrics.rejections.labels("solver").inc()
            log.error("a solver's plan was refused", solve=self.claim.id, method=self.claim.row.method, why=str(error))
            return None
        if self.cost_ns is not None and verdict.cost_ns > self.cost_ns:
            return None
        if frame["type"] == "answer" and verdict.cost_ns == self.cost_ns:
            return None
        return plan, verdict, frame.get("source") or self.claim.row.method

    def _bound_of(self, frame: dict[str, Any]) -> tuple[int | None, Sequence[str]]:
        said = frame if frame["type"] == "progress" else frame["answer"]
        return said["bound_ns"], said["restricted_to"]

    async def _event(
        self, connection: AsyncConnection, frame: dict[str, Any], bound: int | None, within: Sequence[str]
    ) -> None:
        if self.seq is None:
            last = await connection.scalar(select(func.max(events.c.seq)).where(events.c.solve_id == self.claim.id))
            self.seq = last or 0
        self.seq += 1
        at = self.spent_s + (0.0 if self.round_began is None else time.monotonic() - self.round_began)
        await connection.execute(
            events.insert().values(
                solve_id=self.claim.id,
                seq=self.seq,
                seconds=round(at, 3),
                cost_ns=self.cost_ns,
                bound_ns=bound,
                restricted_to=column(within),
                source=(frame.get("source") or self.claim.row.method)[:100],
            )
        )

    async def _write(self, connection: AsyncConnection, values: dict[str, Any]) -> None:
        """A fenced write to our row.

        Raises:
            LostClaim: it is ours no longer; the transaction is rolled back.
        """
        done = await connection.execute(
            update(solves)
            .where(solves.c.id == self.claim.id, solves.c.attempt == self.claim.attempt, solves.c.state == "running")
            .values(revision=solves.c.revision + 1, **values)
        )
        if done.rowcount != 1:
            self.lost = True
            raise LostClaim

    async def _store(self, outcome: Outcome, run: Run, elapsed: float) -> Answer:
        """What a round leaves behind: its bounds, how it ended, and its answer in net bytes."""
        room, claim = self.room, self.claim
        graph_key, budget = claim.row.graph_key, claim.net.budget_bytes
        crashed = outcome.answer is None and run.reason is None
        if crashed:
            self.failures += 1
            again = outcome.kind is None and self.failures < room.settings.most_attempts
            if again and not await self._unwanted():
                log.warning("solver child died; starting another", solve=claim.id, status=run.child.status)
                return replace(outcome.partial("time"), limit="again")
        answer = outcome.final(run.reason, self.round_limit_s - elapsed <= _NEARLY_S)
        async with room.database.write() as connection:
            await self._write(connection, {"spent_s": self.spent_s})
            if outcome.whole_bound_ns is not None:
                await room.store.raise_bound(connection, graph_key, budget, outcome.whole_bound_ns)
            if answer.bound_ns is not None and answer.restricted_to:
                await room.store.raise_bound(
                    connection, graph_key, budget, answer.bound_ns, claim.row.method_key, answer.restricted_to
                )
            if answer.least_budget_bound_bytes is not None or answer.least_budget_bytes is not None:
                least = answer.least_budget_bound_bytes or 0
                if answer.status is Status.INFEASIBLE:
                    least = max(least, budget + 1)
                await room.store.raise_floor(connection, graph_key, least, answer.least_budget_bytes)
            if answer.status not in (Status.FAILED, Status.CANCELLED):
                message = answer.message if not answer.budget_bytes or claim.row.fixed_bytes == 0 else ""
                await room.store.put_effort(
                    connection,
                    graph_key,
                    budget,
                    claim.row.method_key,
                    Effort(
                        self.spent_s, outcome.settled, answer.status.value, answer.limit, answer.restricted_to, message
                    ),
                )
        return await self._best_of(answer, self.round_gap)

    async def _best_of(self, answer: Answer, gap: float) -> Answer:
        """An answer with the best that the store knows beside it: bounds from other budgets, an earlier incumbent."""
        known = await self.room.cache.known(self.claim.caller, self.claim.keys, self.claim.net)
        cost, net = known.cost_ns, self.claim.net
        answer = replace(answer, least_budget_bytes=known.enough_bytes, least_budget_bound_bytes=known.least_bytes)
        if cost is None or known.plan is None:
            return answer
        bound, within = best_bound(known, net, gap)
        gap_now = gap_of(cost, bound)
        status, limit = answer.status, answer.limit
        if bound >= cost:
            status, limit = Status.OPTIMAL, None
        elif status in (Status.NOTHING_FOUND, Status.OPTIMAL, Status.FAILED):
            status = Status.FEASIBLE
        return replace(
            answer,
            status=status,
            limit=limit,
            message=answer.message if cost == answer.cost_ns and bound == answer.bound_ns else "",
            cost_ns=cost,
            bound_ns=bound,
            gap=gap_now,
            overhead=overhead_of(cost, net.subject.total_cost_ns),
            peak_bytes=known.plan.peak_bytes,
            restricted_to=within,
        )

    async def _known_outcome(self, message: str) -> Answer:
        failed = Answer(Status.FAILED, self.claim.row.method, self.claim.net.budget_bytes, message=message)
        return await self._best_of(failed, 0.0)

    async def _unwanted(self) -> bool:
        async with self.room.database.read() as connection:
            return not await open_requests(connection, self.claim.id)

    async def _settle(self, outcome: Answer) -> bool:
        """End every request that the outcome satisfies; True when none is left and the solve has ended too."""
        room, claim = self.room, self.claim
        if outcome.limit == "again":
            return False
        settled: list[str] = []
        async with room.database.write() as connection:
            await self._write(connection, {"spent_s": self.spent_s})  # locks the row: nobody joins from here on
            waiting = await open_requests(connection, claim.id)
            plan = await room.store.best_plan(
                connection, claim.row.graph_key, claim.net.budget_bytes,
                None if claim.row.method_key == "auto" else claim.row.method_key,
            ) if outcome.cost_ns is not None else None  # fmt: skip
            for request in waiting:
                if self._satisfied(request, outcome):
                    said = replace(outcome, digest=request.digest, seconds=round(self.spent_s, 3))
                    if request.fixed_bytes != claim.row.fixed_bytes:
                        said = replace(said, message="")
                    await write_ending(connection, request, said, None if plan is None else plan.id)
                    settled.append(request.id)
            finished = len(settled) == len(waiting)
            if finished:
                await self._write(
                    connection, {"state": "ended", "ended_at": now(), "outcome": outcome.to_json(), "worker": None}
                )
        room.bells.ring(*settled)
        if finished:
            room.bells.ring(claim.id)
        return finished

    def _satisfied(self, request: Any, outcome: Answer) -> bool:
        if outcome.status in (Status.OPTIMAL, Status.INFEASIBLE, Status.FAILED) or outcome.limit in (None, "memory"):
            return True
        if outcome.gap is not None and outcome.gap <= request.max_gap:
            return True
        wanted: float = min(request.time_limit_s, self.room.settings.most_time_limit_s)
        return self.spent_s + _NEARLY_S >= wanted

    async def _end_all(self, outcome: Answer) -> None:
        self.spent_s = self.room.settings.most_time_limit_s
        await self._settle(outcome)

    async def _end_unwanted(self) -> bool:
        async with self.room.database.write() as connection:
            await self._write(connection, {"spent_s": self.spent_s})
            wanted = bool(await open_requests(connection, self.claim.id))
            if not wanted:
                await self._write(connection, {"state": "ended", "ended_at": now(), "worker": None})
        self.room.bells.ring(self.claim.id)
        return not wanted

    def _observe(self, outcome: Answer) -> None:
        metrics = self.room.metrics
        metrics.solve_seconds.labels(outcome.method, outcome.status.value).observe(self.spent_s)
        if outcome.gap is not None:
            metrics.gap.observe(outcome.gap)

    async def _tick(self) -> None:
        """While the child works: a sign of life, requests whose own limit is reached, the last one that leaves."""
        room, claim = self.room, self.claim
        beat = time.monotonic()
        while True:
            bell = room.bells.listen(claim.id)
            await heard(bell, _TICK_S)
            try:
                if time.monotonic() - beat >= room.settings.heartbeat_s:
                    beat = time.monotonic()
                    spent = self.spent_s + beat - (self.round_began or beat)
                    async with room.database.write() as connection:
                        await self._write(connection, {"heartbeat_at": now(), "spent_s": spent})
                await self._review()
            except LostClaim:
                self.lost = True
                if self.run_now is not None:
                    self.run_now.child.signal(signal.SIGKILL)
                return
            except Exception:
                log.exception("a look at the open requests failed; trying again", solve=claim.id)

    async def _review(self) -> None:
        """End requests that want no more than there is by now; stop the child when nobody wants anything."""
        room, claim = self.room, self.claim
        async with room.database.read() as connection:
            waiting = await open_requests(connection, claim.id)
        spent = self.spent_s + time.monotonic() - (self.round_began or time.monotonic())
        whole = self.spent_s + self.round_limit_s
        gap = None if self.cost_ns is None or self.bound_ns is None else gap_of(self.cost_ns, self.bound_ns)
        due: list[tuple[str, str]] = []
        for request in waiting:
            if gap is not None and gap <= request.max_gap and request.max_gap > self.round_gap:
                due.append((request.id, "gap"))
            elif spent >= request.time_limit_s and request.time_limit_s < whole - _NEARLY_S:
                due.append((request.id, "time"))
        if due:
            async with room.database.write() as connection:
                await self._write(connection, {"spent_s": spent})
                for request_id, limit in due:
                    status = Status.NOTHING_FOUND if self.cost_ns is None else Status.FEASIBLE
                    await end_request(room, connection, request_id, status, limit)
            room.bells.ring(*(request_id for request_id, _ in due))
        if len(due) == len(waiting) and self.run_now is not None:
            await self.run_now.cancel()
