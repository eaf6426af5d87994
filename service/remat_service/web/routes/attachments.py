"""`/v1/solves/ID/run`, `…/names`, `…/attachments`: what a job says of a solve once it runs by its plan."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ...context import Context
from ...requests.attachments import OP_NAMES, RUN_REPORT, attach, attached
from ..authentication import Reader, Solver
from ..body import read_document
from ..schemas import AttachmentsDocument, body, refusals
from .solves import SolveId

router = APIRouter(prefix="/v1/solves", tags=["solves"])

_RUN_EXAMPLE = {
    "predicted_bytes": 731_906_048,
    "measured_bytes": 731_910_144,
    "predicted_ns": 161_500_000,
    "measured_ns": 163_200_000,
    "device": "NVIDIA H100 80GB HBM3",
}
_NAMES_EXAMPLE = {"names": ["embed", "h.0.attn", "loss"], "where": ["model.py:31", "model.py:52", "train.py:12"]}


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


@router.put(
    "/{solve_id}/run",
    summary="Report a run by the plan",
    status_code=204,
    responses=refusals(404, 408, 413, 415),
    openapi_extra=body(RUN_REPORT, _RUN_EXAMPLE),
)
async def put_run(request: Request, solve_id: SolveId, caller: Solver) -> None:
    """What a step by the plan was measured to take; a later report takes the place of an earlier one."""
    said = await read_document(request, RUN_REPORT)
    await attach(_context(request), caller, solve_id, "run", said)


@router.put(
    "/{solve_id}/names",
    summary="Name the ops",
    status_code=204,
    responses=refusals(404, 408, 413, 415),
    openapi_extra=body(OP_NAMES, _NAMES_EXAMPLE),
)
async def put_names(request: Request, solve_id: SolveId, caller: Solver) -> None:
    """Names of ops, for who looks at the plan; refused (403) unless an operator lets this tenant store them."""
    said = await read_document(request, OP_NAMES)
    await attach(_context(request), caller, solve_id, "names", said)


@router.get(
    "/{solve_id}/attachments",
    summary="What a job has said",
    response_model=AttachmentsDocument,
    responses=refusals(404),
)
async def get_attachments(request: Request, solve_id: SolveId, caller: Reader) -> Any:
    """The run by the plan as it was reported, and the names of the ops; null where there is none."""
    return await attached(_context(request), caller, solve_id)
