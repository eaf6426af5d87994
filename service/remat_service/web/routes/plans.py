"""`/v1/plans`: the best stored plan of a problem, by its digest."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from ...requests import stored_plans
from ...requests.parse import method_of
from ..authentication import Reader, Solver
from ..schemas import AnswerDocument
from .describe import refusals

router = APIRouter(prefix="/v1/plans", tags=["plans"])

Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="Digest of a problem.")]


@router.get(
    "/{digest}",
    summary="The best stored plan of a problem",
    response_model=AnswerDocument,
    responses=refusals(404),
)
async def get_plan(
    request: Request,
    digest: Digest,
    caller: Reader,
    method: Annotated[str, Query(description="`auto` takes any method's plan, every other only its own.")] = "auto",
) -> Response:
    """Verified on its way out. Bytes are net of fixed bytes, which a digest does not know."""
    text = await stored_plans.plan_by_digest(request.app.state.context, caller, digest, method_of(method))
    return Response(text, media_type="application/json")


@router.put("/{digest}/pin", summary="Keep a plan from eviction", status_code=204, responses=refusals(404))
async def pin_plan(request: Request, digest: Digest, caller: Solver) -> Response:
    """The best plan of the problem stays in the store until it is unpinned."""
    await stored_plans.pin_by_digest(request.app.state.context, caller, digest, True)
    return Response(status_code=204)


@router.delete("/{digest}/pin", summary="Let a plan be evicted again", status_code=204, responses=refusals(404))
async def unpin_plan(request: Request, digest: Digest, caller: Solver) -> Response:
    """The plan goes when its turn comes."""
    await stored_plans.pin_by_digest(request.app.state.context, caller, digest, False)
    return Response(status_code=204)
