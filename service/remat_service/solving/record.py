"""What a claimed solve has found, written down before anybody hears of it; every write is fenced by the claim."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import InvalidData, InvalidPlan, read_plan

from ..context import Context
from ..storage.store import column
from ..storage.tables import events, solves
from .claim import Claim, LostClaim
from .outcome import Outcome

log = structlog.get_logger("remat_service.solving.record")


class SolveRecord:
    """The row of a solve as its worker knows it.

    Attributes:
        spent_s: seconds of solving in rounds that have ended.
        cost_ns, bound_ns: of the best so far.
        lost: the claim is somebody else's now.
    """

    def __init__(self, context: Context, claim: Claim) -> None:
        self._context, self._claim = context, claim
        self.spent_s: float = claim.row.spent_s
        self.cost_ns: int | None = claim.row.cost_ns
        self.bound_ns: int | None = claim.row.bound_ns
        self.lost = False
        self._began: float | None = None
        self._seq: int | None = 0 if claim.attempt == 1 else None  # None: others have written events, look them up

    def begin(self) -> None:
        """A round starts now."""
        self._began = time.monotonic()

    def end(self) -> float:
        """The round ends now: its seconds, which count as spent from here on."""
        elapsed = 0.0 if self._began is None else time.monotonic() - self._began
        self._began = None
        self.spent_s += elapsed
        return elapsed

    def spent(self) -> float:
        """Seconds of solving up to this moment."""
        return self.spent_s + (0.0 if self._began is None else time.monotonic() - self._began)

    async def write(self, connection: AsyncConnection, values: dict[str, Any]) -> None:
        """A fenced write to our row.

        Raises:
            LostClaim: it is ours no longer; the transaction is rolled back.
        """
        done = await connection.execute(
            update(solves)
            .where(solves.c.id == self._claim.id, solves.c.attempt == self._claim.attempt, solves.c.state == "running")
            .values(revision=solves.c.revision + 1, **values)
        )
        if done.rowcount != 1:
            self.lost = True
            raise LostClaim

    async def take(self, outcome: Outcome, frame: dict[str, Any]) -> None:
        """A frame from the child: verified, then stored, then told."""
        context, claim = self._context, self._claim
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
        bound, within = _bound_of(frame)
        if better is None and bound == self.bound_ns:
            return
        async with context.database.write() as connection:
            values: dict[str, Any] = {"bound_ns": bound, "restricted_to": column(within)}
            if better is not None:
                plan, verdict, source = better
                plan_id, digest = await context.store.put_plan(
                    connection, claim.row.graph_key, claim.row.method_key, source, plan, verdict
                )
                context.verifier.remember(claim.row.graph_key, digest, verdict)
                if self.cost_ns is None or verdict.cost_ns <= self.cost_ns:
                    values |= {"plan_id": plan_id, "cost_ns": verdict.cost_ns}
                    self.cost_ns = verdict.cost_ns
            if outcome.whole_bound_ns is not None:
                await context.store.raise_bound(
                    connection, claim.row.graph_key, claim.net.budget_bytes, outcome.whole_bound_ns
                )
            await self.write(connection, values)
            await self._event(connection, frame, bound, within)
        self.bound_ns = bound
        context.notifier.notify(claim.id)

    async def _judged(self, data: object, frame: dict[str, Any]) -> Any:
        try:
            plan = await asyncio.to_thread(read_plan, data)
            verdict = await self._context.verifier.verify(self._claim.net, plan)
        except (InvalidData, InvalidPlan) as error:
            self._context.metrics.rejections.labels("solver").inc()
            log.error(
                "a solver's plan was refused", solve=self._claim.id, method=self._claim.row.method, why=str(error)
            )
            return None
        if self.cost_ns is not None and verdict.cost_ns > self.cost_ns:
            return None
        if frame["type"] == "answer" and verdict.cost_ns == self.cost_ns:
            return None
        return plan, verdict, frame.get("source") or self._claim.row.method

    async def _event(
        self, connection: AsyncConnection, frame: dict[str, Any], bound: int | None, within: Sequence[str]
    ) -> None:
        if self._seq is None:
            last = await connection.scalar(select(func.max(events.c.seq)).where(events.c.solve_id == self._claim.id))
            self._seq = last or 0
        self._seq += 1
        await connection.execute(
            events.insert().values(
                solve_id=self._claim.id,
                seq=self._seq,
                seconds=round(self.spent(), 3),
                cost_ns=self.cost_ns,
                bound_ns=bound,
                restricted_to=column(within),
                source=(frame.get("source") or self._claim.row.method)[:100],
            )
        )


def _bound_of(frame: dict[str, Any]) -> tuple[int | None, Sequence[str]]:
    said = frame if frame["type"] == "progress" else frame["answer"]
    return said["bound_ns"], said["restricted_to"]
