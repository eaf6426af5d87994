"""`/v1/sweeps` and `/v1/max-batch`: many budgets in one request, and the largest batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from ...context import Context
from ...identity import ID, Caller
from ...requests import groups
from ...requests.groups import MAX_BATCH, SWEEP
from ...requests.parse import from_body
from ...settings import Settings
from ..authentication import Reader, Solver
from ..body import body_of, no_body
from ..schemas import BatchDocument, SweepDocument, asked, body, examples, refusals
from .solves import Wait, final, preferred_wait, under_way

router = APIRouter(tags=["groups"])

GroupId = Annotated[str, Path(pattern=ID.pattern, description="Id of a group of requests.")]
_ROUTES = {SWEEP: "/v1/sweeps", MAX_BATCH: "/v1/max-batch"}


async def _answered(request: Request, caller: Caller, kind: str, group_id: str, wait_s: float = 0.0) -> Response:
    context: Context = request.app.state.context
    data, ended = await groups.status(context, request.app.state.batch_searches, caller, kind, group_id, wait_s)
    text = json.dumps(data).encode()
    return final(text) if ended else under_way(context, f"{_ROUTES[kind]}/{group_id}", text)


async def _started(request: Request, caller: Caller, reader: Callable[[Any, Settings], groups.Group]) -> Response:
    context: Context = request.app.state.context
    async with body_of(request) as sent:
        group = await from_body(sent, reader, context.settings)
        group_id = await groups.start(context, request.app.state.batch_searches, caller, group)
    return await _answered(request, caller, group.kind, group_id, preferred_wait(request))


async def _given_up(request: Request, caller: Caller, kind: str, group_id: str) -> Response:
    await no_body(request)
    await groups.give_up(request.app.state.context, caller, kind, group_id)
    return await _answered(request, caller, kind, group_id)


@router.post(
    "/v1/sweeps",
    summary="Plan one step at many budgets",
    response_model=SweepDocument,
    responses=asked(SweepDocument, "get_sweep", "group_id", 408, 409, 413, 415),
    openapi_extra=body(groups.SWEEP_REQUEST, examples()["sweep"]),
)
async def post_sweep(request: Request, caller: Solver) -> Response:
    """Each budget is a solve of its own; bounds and plans are shared between them. Plans are read by solve id."""
    return await _started(request, caller, groups.read_sweep)


@router.get(
    "/v1/sweeps/{group_id}",
    summary="Poll a sweep",
    response_model=SweepDocument,
    responses={202: {"model": SweepDocument, "description": "Still under way."}, **refusals(404)},
)
async def get_sweep(request: Request, group_id: GroupId, caller: Reader, wait: Wait = 0.0) -> Response:
    """The answers so far, without plans."""
    return await _answered(request, caller, SWEEP, group_id, wait)


@router.post(
    "/v1/sweeps/{group_id}/cancel",
    summary="Give a sweep up",
    response_model=SweepDocument,
    responses={202: {"model": SweepDocument, "description": "Still under way."}, **refusals(404, 408, 413, 415)},
)
async def cancel_sweep(request: Request, group_id: GroupId, caller: Solver) -> Response:
    """Each of its solves ends with the best that it has found; shared ones go on for those who still wait."""
    return await _given_up(request, caller, SWEEP, group_id)


@router.post(
    "/v1/max-batch",
    summary="The largest batch that fits",
    response_model=BatchDocument,
    responses=asked(BatchDocument, "get_batch", "group_id", 408, 409, 413, 415),
    openapi_extra=body(groups.BATCH_REQUEST, examples()["max_batch"]),
)
async def post_batch(request: Request, caller: Solver) -> Response:
    """A search for the largest batch whose plan costs at most one more forward pass (equation 9), and a bound.

    With `batches`, each of these sizes is a solve, and `best_batch` the largest with a plan.
    """
    return await _started(request, caller, groups.read_batches)


@router.get(
    "/v1/max-batch/{group_id}",
    summary="Poll a search for the largest batch",
    response_model=BatchDocument,
    responses={202: {"model": BatchDocument, "description": "Still under way."}, **refusals(404)},
)
async def get_batch(request: Request, group_id: GroupId, caller: Reader, wait: Wait = 0.0) -> Response:
    """The batches tried so far, the largest with a plan, and the bound above which there is none."""
    return await _answered(request, caller, MAX_BATCH, group_id, wait)


@router.post(
    "/v1/max-batch/{group_id}/cancel",
    summary="Give a search for the largest batch up",
    response_model=BatchDocument,
    responses=refusals(404, 408, 413, 415),
)
async def cancel_batch(request: Request, group_id: GroupId, caller: Solver) -> Response:
    """The search ends with what it has found and proved."""
    return await _given_up(request, caller, MAX_BATCH, group_id)
