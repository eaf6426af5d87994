"""What the service says of itself: alive, ready, metrics, what it can do; and the page at `/`.

The page is made of files of this package, and of nothing from anywhere else.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from remat_solver import METHODS, solver_version

from ...context import COME_BACK_S, Context
from ...errors import Unauthorized, Unavailable
from ...identity import OPERATE, Caller
from ...requests.attachments import stores_names
from ...requests.operate import queue_by_tenant, workers
from ...storage.database import Outage
from ...telemetry import metrics_exported_every_s
from ..authentication import Here, caller_with
from ..schemas import Capabilities, Health, refusals

log = structlog.get_logger("remat_service.web.service")

router = APIRouter(tags=["service"])


@router.get("/livez", summary="Alive?", response_model=Health)
async def livez() -> Any:
    """The process answers."""
    return {"status": "alive"}


@router.get("/readyz", summary="Ready?", response_model=Health, responses=refusals(keyed=False))
async def readyz(context: Here) -> Any:
    """The database takes writes, solves can start at once where they run here, and the service is not stopping."""
    if context.stopping:
        raise Unavailable("stopping", retry_after_s=COME_BACK_S)
    wrong = await context.health.wrong()
    if wrong is not None:
        raise Unavailable(wrong, retry_after_s=5)
    if context.settings.embedded and not context.supervisor.ready:
        raise Unavailable("the solver's kernels are not there yet", retry_after_s=5)
    return {"status": "ready"}


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "The exposition format."}, **refusals(keyed=False)},
)
async def metrics(request: Request, context: Here) -> Response:
    """The exposition format, version 0.0.4. Where `REMAT_METRICS_KEY` is set, it is asked for as a bearer key."""
    key = context.settings.metrics_key
    if key is not None and not _is_key(request.headers.get("authorization", ""), key.get_secret_value()):
        raise Unauthorized("/metrics needs the key in REMAT_METRICS_KEY: Authorization: Bearer …")
    await _look(context)
    return Response(context.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _look(context: Context) -> None:
    """Set the gauges of what waits and runs, by tenant, and of who works; a tenant that has neither is left out."""
    async with context.database.read() as connection:
        by_tenant = await queue_by_tenant(context, connection)
        alive, busy = await workers(context, connection)
    metrics = context.metrics
    for gauge in (metrics.tenant_queued, metrics.tenant_running, metrics.tenant_oldest_seconds):
        gauge.clear()
    for each in by_tenant:
        if each.running:
            metrics.tenant_running.labels(each.tenant).set(each.running)
        if each.oldest_queued_s is not None:
            metrics.tenant_queued.labels(each.tenant).set(each.queued)
            metrics.tenant_oldest_seconds.labels(each.tenant).set(each.oldest_queued_s)
    metrics.queued.set(sum(each.queued for each in by_tenant))
    metrics.in_progress.set(sum(each.running for each in by_tenant))
    metrics.workers_alive.set(alive)
    metrics.workers_busy.set(busy)


async def keep_gauges(context: Context) -> None:
    """Set the gauges as often as metrics are exported: a collector does not ask for `/metrics`, which sets them too."""
    every_s, outage = metrics_exported_every_s(), Outage(log, "looking at the queue for its gauges")
    while every_s is not None and not context.stopping:
        with outage:
            await _look(context)
        await asyncio.sleep(every_s)


def _is_key(authorization: str, key: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


@router.get("/v1/capabilities", summary="What this service does", response_model=Capabilities, responses=refusals())
async def capabilities(context: Here, caller: Annotated[Caller, Depends(caller_with("read", OPERATE))]) -> Any:
    """Methods with their options and defaults, formats, limits."""
    settings = context.settings
    return {
        "version": solver_version(),
        "tenant": caller.tenant,
        "group": caller.group,
        "stores_names": await stores_names(context, caller),
        "scopes": list(caller.allowed),
        "formats": ["remat-graph/1", "remat-chain/1", "remat-join/1"],
        "methods": [
            {
                "name": method.name,
                "summary": method.summary,
                "takes": list(method.takes),
                "options": asdict(method.options()),
                "restricted_to": list(method.restriction),
            }
            for method in METHODS.values()
        ],
        "limits": {
            name: getattr(settings, name)
            for name in (
                "most_time_limit_s", "most_queue_limit_s", "longest_wait_s", "most_wire_bytes", "most_body_bytes",
                "most_ops", "most_values", "most_edges", "most_sweep",
            )
        },
    }  # fmt: skip


FILES = Path(__file__).parents[1] / "page" / "static"

GUARDS = {
    # uPlot and the canvas draw with script; nothing is inline, nothing is fetched from elsewhere, nobody may frame it
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

page_router = APIRouter(include_in_schema=False)


@page_router.get("/")
async def page() -> Response:
    """The page; what it shows, it asks of the API like anybody else."""
    return FileResponse(FILES / "index.html", headers=GUARDS)


class Files(StaticFiles):
    """The page's scripts and styles, under the page's own guards, to be mounted at `/static`."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file."""
        response = await super().get_response(path, scope)
        response.headers.update(GUARDS)
        return response
