"""`/v1/profiles`: measured costs of ops, shared so that two jobs of one step send the same graph."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ...context import Context
from ...requests.profiles import LOOKUP, UPLOAD, look_up, put, read_lookup, read_upload
from ..authentication import Reader, Solver
from ..body import read_body
from ..schemas import ProfileTable
from .describe import body, examples, refusals

router = APIRouter(tags=["profiles"])


@router.post(
    "/v1/profiles:lookup",
    summary="Look measured costs up",
    response_model=ProfileTable,
    responses=refusals(408, 413, 415),
    openapi_extra=body(LOOKUP, examples()["profile_lookup"]),
)
async def lookup_profiles(request: Request, caller: Reader) -> Any:
    """Those of the signatures that are known for the device."""
    context: Context = request.app.state.context
    device, signatures = await read_body(request, read_lookup)
    return {"profiles": await look_up(context, caller, device, signatures)}


@router.post(
    "/v1/profiles",
    summary="Share measured costs",
    response_model=ProfileTable,
    responses=refusals(408, 413, 415),
    openapi_extra=body(UPLOAD, examples()["profile_upload"]),
)
async def put_profiles(request: Request, caller: Solver) -> Any:
    """The first report of a signature stands until three tenants' say otherwise; the reply is what now stands."""
    context: Context = request.app.state.context
    device, profiles = await read_body(request, read_upload)
    return {"profiles": await put(context, caller, device, profiles)}
