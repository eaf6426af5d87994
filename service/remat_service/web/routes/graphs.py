"""`/v1/graphs:validate` and `/v1/cache:explain`: what would happen, without solving anything."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from remat_ir import Problem, graph_digest, plain_peak, structure_digest
from remat_solver import least_need

from ...context import Context
from ...requests.explain import explain
from ...requests.parse import CHECK_REQUEST, SOLVE_REQUEST, from_body, model_entries, read_ask, read_problem
from ...settings import Settings
from ...subjects import size_of
from ..authentication import Reader
from ..body import Bodies, read_body
from ..schemas import ExplainDocument, ValidateDocument
from .describe import body, examples, refusals

router = APIRouter(tags=["graphs"])


@router.post(
    "/v1/graphs:validate",
    summary="Check a graph",
    response_model=ValidateDocument,
    responses=refusals(408, 413, 415),
    openapi_extra=body(CHECK_REQUEST, examples()["validate"]),
)
async def validate_graph(request: Request, caller: Reader) -> Any:
    """Everything that a solve would refuse is refused here; nothing is stored."""
    return await read_body(request, _about)


def _about(data: Any, settings: Settings) -> dict[str, Any]:
    if isinstance(data, dict) and "budget_bytes" not in data:
        data = {**data, "budget_bytes": 0}
    problem: Problem = read_problem(data, settings, "")
    ops, edges = size_of(problem.subject)
    return {
        "kind": problem.kind,
        "digest": graph_digest(problem.subject),
        "structure_digest": structure_digest(problem.subject),
        "ops": ops,
        "edges": edges,
        "total_cost_ns": problem.subject.total_cost_ns,
        "fixed_bytes": problem.subject.fixed_bytes,
        "plain_peak_bytes": plain_peak(problem.subject),
        "least_budget_bound_bytes": least_need(problem.subject)[0],
        "model_entries": model_entries(ops, edges),
    }


@router.post(
    "/v1/cache:explain",
    summary="Why a request would hit or miss",
    response_model=ExplainDocument,
    responses=refusals(408, 413, 415),
    openapi_extra=body(SOLVE_REQUEST, examples()["solve"]),
)
async def explain_lookup(request: Request, caller: Reader) -> Any:
    """The body of `POST /v1/solves`; the reply says what the store has for it and what differs."""
    context: Context = request.app.state.context
    bodies: Bodies = request.app.state.bodies
    async with bodies.of(request) as sent:
        return await explain(context, caller, await from_body(sent, read_ask, context.settings))
