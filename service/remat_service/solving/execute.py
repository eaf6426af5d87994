"""One solve from claim to end, whoever dispatches it: `execute` is the only way in which anything is solved."""

from __future__ import annotations

import asyncio

import structlog

from ..context import Context
from ..outage import first_line, is_outage
from ..storage.queue import Claimed, LostClaim
from ..telemetry import span
from .claim import give_back, read_claim
from .run import SolveRun

log = structlog.get_logger("remat_service.solving.execute")


_MOST_NAMED = 20  # requests that the last line of a solve names; thousands may have joined


async def execute(context: Context, claimed: Claimed) -> None:
    """See a claimed solve to its end, or give it back."""
    row = claimed.row
    context.metrics.queue_seconds.observe(claimed.queued_s)
    context.metrics.running.inc()
    logger = log.bind(solve=claimed.id, attempt=claimed.attempt, method=row.method)
    begun = context.clock.monotonic()
    tenant = ""
    try:
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
