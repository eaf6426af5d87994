"""One solve from claim to end, whoever dispatches it: `execute_solve` is the only way in which anything is solved.

A claim raises the solve's `attempt`, and every later write says `WHERE attempt = mine`: who has lost the claim writes
nothing.
"""

from __future__ import annotations

import asyncio

import structlog

from ..context import Context
from ..outage import first_line, is_outage
from ..telemetry import span
from .claim import LostClaim, claim_solve, give_back
from .run import SolveRun

log = structlog.get_logger("remat_service.solving.execute")


async def execute_solve(context: Context, solve_id: str, ticket: int | None = None) -> bool:
    """Claim a solve and see it to its end; False where it was not there to be claimed."""
    claim = await claim_solve(context, solve_id, ticket)
    if claim is None:
        return False
    context.metrics.running.inc()
    logger = log.bind(solve=claim.id, attempt=claim.attempt, method=claim.row.method)
    logger.info("solve started", queued_s=round(claim.queued_s, 3))
    begun = context.clock.monotonic()
    try:
        about = {"remat.solve": claim.id, "remat.method": claim.row.method, "remat.attempt": claim.attempt}
        with span("solve", claim.row.trace, about) as note:
            outcome = await SolveRun(context, claim).run()
            if outcome is not None:
                note("remat.status", outcome.status.value)
        if outcome is not None:
            logger.info(
                "solve ended",
                status=outcome.status.value,
                gap=outcome.gap,
                seconds=round(context.clock.monotonic() - begun, 3),
            )
    except LostClaim:
        logger.warning("solve taken over by another worker")
    except asyncio.CancelledError:
        await asyncio.shield(give_back(context, claim))
        logger.info("solve given back to the queue")
        raise
    except Exception as error:
        if is_outage(error):
            logger.warning("solve broke off; it will be taken up again", error=first_line(error))
        else:
            logger.exception("solve broke off; it will be taken up again")
        await give_back(context, claim, context.settings.stale_after_s)
    finally:
        seconds = context.clock.monotonic() - begun
        context.turns.spend(claim.caller.tenant_id, seconds)
        context.metrics.tenant_seconds.labels(claim.caller.tenant).inc(seconds)
        context.metrics.running.dec()
    return True
