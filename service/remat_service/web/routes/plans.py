"""`/v1/plans`, `/v1/graphs:validate` and `/v1/cache:explain`: what is stored of a problem, without solving anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from sqlalchemy import select
from starlette.responses import Response

from remat_ir import Graph, Problem, Subject, duration, gap_of, graph_digest, plain_peak, readable, structure_digest
from remat_solver import least_need

from ...context import Context
from ...errors import NotFound
from ...identity import Caller, Keys, costs_of, keys_of, method_key_of, size_of
from ...requests.parse import (
    CHECK_REQUEST,
    SOLVE_REQUEST,
    Ask,
    from_body,
    method_of,
    model_entries,
    read_ask,
    read_problem,
)
from ...requests.read import plan_text, stored_subject
from ...settings import Settings
from ...storage.answers import Stored, document, head_of, spliced
from ...storage.eviction import pin, unpin
from ...storage.tables import graphs, problems, requests
from ..authentication import Here, Reader, Solver
from ..body import body_of, read_body
from ..schemas import AnswerDocument, ExplainDocument, ValidateDocument, body, examples, refusals

router = APIRouter(prefix="/v1/plans", tags=["plans"])

_NO_PLAN = "there is no plan for this digest"
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="Digest of a problem.")]


@router.get(
    "/{digest}",
    summary="The best stored plan of a problem",
    response_model=AnswerDocument,
    responses=refusals(404),
)
async def get_plan(
    context: Here,
    digest: Digest,
    caller: Reader,
    method: Annotated[str, Query(description="`auto` takes any method's plan, every other only its own.")] = "auto",
) -> Response:
    """Verified on its way out. Bytes are net of fixed bytes, which a digest does not know."""
    net, keys = await _problem_by_digest(context, caller, digest, method_of(method))
    known = replace(await context.cache.known(caller, keys, net), near=None)
    plan, text = known.plan, None
    if plan is not None:
        text = await plan_text(context, caller, plan.graph_key, plan.data, plan.claimed, net.budget_bytes)
    if text is None:
        raise NotFound(_NO_PLAN)
    answer = known.with_claims(known.known.answer(method, 0.0, digest=digest))
    proof, _ = known.certificate(answer.restricted_to)
    head = head_of(document(answer, 0, cache="hit"))
    return Response(spliced(head, text, None if proof is None else proof.text), media_type="application/json")


@router.put("/{digest}/pin", summary="Keep a plan from eviction", status_code=204, responses=refusals(404))
async def pin_plan(context: Here, digest: Digest, caller: Solver) -> Response:
    """The best plan of the problem stays in the store until it is unpinned."""
    await pin_by_digest(context, caller, digest, True)
    return Response(status_code=204)


@router.delete("/{digest}/pin", summary="Let a plan be evicted again", status_code=204, responses=refusals(404))
async def unpin_plan(context: Here, digest: Digest, caller: Solver) -> Response:
    """The plan goes when its turn comes."""
    await pin_by_digest(context, caller, digest, False)
    return Response(status_code=204)


async def pin_by_digest(context: Context, caller: Caller, digest: str, pinned: bool) -> None:
    """Pin the best plan of a problem digest for the caller's tenant, or take the tenant's pins of the problem back.

    Raises:
        NotFound: this tenant's scope has none.
    """
    net, keys = await _problem_by_digest(context, caller, digest, "auto")
    known = await context.cache.known(caller, keys, net)
    if known.plan is None:
        raise NotFound(_NO_PLAN)
    change = pin if pinned else unpin
    await change(context.database, known.plan.id, caller.tenant_id, keys.problem)


async def _problem_by_digest(context: Context, caller: Caller, digest: str, method: str) -> tuple[Problem, Keys]:
    query = select(problems.c.graph_key, problems.c.budget_bytes).where(problems.c.key == caller.key(digest))
    row = await context.database.first(query)
    subject = None if row is None else await stored_subject(context, caller, row.graph_key)
    if subject is None or row is None:
        raise NotFound(_NO_PLAN)
    keys = Keys(digest, caller.key(digest), row.graph_key, "", method, "")
    return Problem(subject, row.budget_bytes), keys


graphs_router = APIRouter(tags=["graphs"])


@graphs_router.post(
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


@graphs_router.post(
    "/v1/cache:explain",
    summary="Why a request would hit or miss",
    response_model=ExplainDocument,
    responses=refusals(408, 413, 415),
    openapi_extra=body(SOLVE_REQUEST, examples()["solve"]),
)
async def explain_lookup(request: Request, context: Here, caller: Reader) -> Any:
    """The body of `POST /v1/solves`; the reply says what the store has for it and what differs."""
    async with body_of(request) as sent:
        return await explain(context, caller, await from_body(sent, read_ask, context.settings))


_RECENT = 20


async def explain(context: Context, caller: Caller, ask: Ask) -> dict[str, Any]:
    """What the store has for a request: `result`, and `reasons` in sentences."""
    net, digests = ask.net, ask.digests
    if net is None or digests is None:
        return {"result": "hit", "digest": "", "reasons": ["The budget does not cover the fixed bytes: infeasible."]}
    keys = keys_of(caller, digests, method_key_of(ask.method, ask.options, ask.start, ask.certify))
    stored = await context.cache.known(caller, keys, net)
    final = not ask.force and stored.is_final(ask.max_gap, ask.time_limit_s)
    reasons = _parts(stored, ask)
    if ask.force:
        reasons.append("It is solved anew whatever is stored: force is set.")
    if await context.database.first(select(graphs.c.key).where(graphs.c.key == keys.graph)) is None:
        reasons += await _differences(context, caller, keys, net)
    elif stored.effort is None:
        reasons.append(f"This graph is stored, but {ask.method!r} has not been run at this budget.")
    result = stored.source if final else "miss"
    return {"result": result, "digest": keys.digest, "reasons": reasons}


def _parts(stored: Stored, ask: Ask) -> list[str]:
    said = []
    known = stored.known
    cost = known.cost_ns
    if cost is None:
        said.append("No plan within this budget is stored for this graph and method.")
    else:
        bound, within = known.bound(ask.max_gap)
        gap = gap_of(cost, bound)
        where = f" within {', '.join(within)}" if within else ""
        compared = "within" if gap <= ask.max_gap else "over"
        said.append(f"The best plan costs {duration(cost)}, the best bound{where} is {duration(bound)}: a gap of "
                    f"{gap:.6f}, {compared} the {ask.max_gap:g} asked for.")  # fmt: skip
    if known.least_bytes is not None and known.least_bytes > known.problem.budget_bytes:
        answer = stored.answer(ask.method, ask.max_gap, "")
        sure = "is proved" if answer.claimed_by is None else f"is claimed by {answer.claimed_by!r}"
        least = answer.least_budget_bound_bytes
        said.append(f"Every plan {sure} to need {readable(least or 0)} besides the fixed ones.")
    effort = stored.effort
    if effort is not None:
        ended = "it has run to its end" if effort.settled else f"{ask.time_limit_s:g} s are asked for"
        said.append(f"{ask.method!r} was run for {effort.seconds:.3g} s at this budget; {ended}.")
    return said


async def _differences(context: Context, caller: Caller, keys: Keys, net: Problem) -> list[str]:
    """What sets this graph apart from the tenant's recent ones."""
    recent = select(requests.c.graph_key).where(requests.c.tenant_id == caller.tenant_id)
    query = (
        select(graphs.c.key, graphs.c.structure_key, graphs.c.ops, graphs.c.data)
        .where(graphs.c.key.in_(recent.order_by(requests.c.id.desc()).limit(_RECENT)))
        .order_by(graphs.c.used_at.desc())
    )
    rows = await context.database.rows(query)
    same = [row for row in rows if row.structure_key == keys.structure]
    ops = size_of(net.subject)[0]
    alike = same or [row for row in rows if row.ops == ops]
    if not alike:
        return ["No graph with as many ops was asked about lately."]
    other = await context.verifier.graph(alike[0].key, alike[0].data, caller.key)
    if other is None:
        return []
    if same:
        return [_cost_difference(net.subject, other)]
    return ["No stored graph has this structure. Nearest: " + _structure_difference(net.subject, other)]


def _cost_difference(mine: Subject, other: Subject) -> str:
    pairs = list(zip(costs_of(mine), costs_of(other), strict=True))
    moved = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not moved:
        return "A graph of the same structure and costs is stored under another epoch."
    a, b = pairs[moved[0]]
    return (
        f"A graph of the same structure is stored with other costs in {len(moved)} of {len(pairs)} places; "
        f"first at {moved[0]}: {a} ns sent, {b} ns stored. Costs from the shared profile table would be equal."
    )


def _structure_difference(mine: Subject, other: Subject) -> str:
    if not isinstance(mine, Graph) or not isinstance(other, Graph):
        return "another kind of problem."
    for name in ("op_inputs", "value_op", "value_bytes", "op_workspace_bytes", "optional", "once", "keep", "consumes"):
        a, b = getattr(mine, name), getattr(other, name)
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"{name} differs first at {place}."
    return "backward_from differs."
