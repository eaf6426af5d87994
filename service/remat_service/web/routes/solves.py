"""`/v1/solves`: ask for a plan, wait for it, watch it, give it up, say how the job runs by it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response, StreamingResponse

from remat_ir import Status

from ...context import COME_BACK_S, Context
from ...errors import BadRequest, ServiceError
from ...identity import ID, Caller, Retry
from ...requests import read
from ...requests.attachments import OP_NAMES, RUN_REPORT, attach, attached
from ...requests.completion import cancel
from ...requests.listing import SORTS, Selection, list_requests
from ...requests.parse import SOLVE_REQUEST, KnownSubjects
from ...requests.submit import Submission
from ..authentication import Here, Reader, Solver, admit, credentials, reader, solver
from ..body import body_of, no_body, read_document
from ..schemas import (
    AnswerDocument,
    AttachmentsDocument,
    ProblemOut,
    ProgressList,
    SolveList,
    TimelineDocument,
    asked,
    body,
    examples,
    headers,
    refusals,
)

Way = Callable[[Request], Awaitable[Response | None]]
"""Answers a request; None leaves it to the usual way."""

_WAYS: dict[Callable[..., Any], Way] = {}
"""The direct ways, by the endpoints of their routes."""


class DirectRoute(APIRoute):
    """A route that goes its direct way, where it has one, without FastAPI's reading of parameters, as long as a hit.

    A direct way calls the same function as the usual one, with the same caller, and leaves to the usual one what it
    does not read itself.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The direct way, then the usual one."""
        usual, endpoint = super().get_route_handler(), self.endpoint

        async def handler(request: Request) -> Response:
            way = _WAYS.get(endpoint)
            response = None if way is None else await way(request)
            return await usual(request) if response is None else response

        return handler


_ALIVE_S = 10.0
_KEY_S = 1.0
"""Seconds between looks at the key, which cost no query while it is remembered; the database is read at a change."""


EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Send it back as Last-Event-ID."},
        "event": {"enum": ["progress", "end"]},
        "data": {"type": "string", "description": "JSON: a point of progress, or the answer without its plan."},
        "retry": {"type": "integer"},
    },
}

router = APIRouter(prefix="/v1/solves", tags=["solves"], route_class=DirectRoute)

SolveId = Annotated[str, Path(pattern=ID.pattern, description="Id of a request.")]
Wait = Annotated[float, Query(ge=0, le=30, description="Seconds to hold the reply until the solve has ended.")]
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6}(?:\.\d+)?)")


def preferred_wait(request: Request) -> float:
    """Seconds that a `Prefer: wait=N` header asks for; a preference that can't be met is not an error."""
    found = _WAIT.search(",".join(request.headers.getlist("prefer")))
    return 0.0 if found is None else float(found.group(1))


async def answered(context: Context, caller: Caller, request_id: str, wait_s: float, waits: bool = False) -> Response:
    """200 with the whole answer when the request has ended within `wait_s`, else 202 with what there is."""
    until = context.clock.monotonic() + min(wait_s, context.settings.longest_wait_s)
    text, ended = await read.answer(context, caller, request_id, until, waits)
    return final(text) if ended else under_way(context, f"/v1/solves/{request_id}", text)


def final(text: bytes) -> Response:
    """The response that has all there is to come."""
    return Response(text, 200, {"Cache-Control": "no-store"}, "application/json")


def under_way(context: Context, where: str, text: bytes) -> Response:
    """What there is so far; where to come for the rest, and after how many seconds."""
    after = str(COME_BACK_S if context.stopping else 1)
    headers = {"Cache-Control": "no-store", "Location": where, "Retry-After": after}
    return Response(text, 202, headers, "application/json")


@router.post(
    "",
    summary="Ask for a plan",
    response_model=AnswerDocument,
    responses=asked(
        AnswerDocument, "get_solve", "solve_id", 404, 408, 409, 413, 415, under_way="Under way; poll `Location`."
    ),
    openapi_extra={
        **body(SOLVE_REQUEST, examples()["solve"]),
        "parameters": headers(
            Prefer=({"type": "string", "example": "wait=10"}, "`wait=N`: seconds to hold the reply until the end."),
            Idempotency_Key=(
                {"type": "string", "minLength": 1, "maxLength": 200},
                "Makes a repeated POST of the same body the same request.",
            ),
        ),
    },
)
async def post_solve(request: Request, caller: Solver) -> Response:
    """A plan for a problem: at once when it is stored or done within `Prefer: wait=N` seconds, else under way.

    Identical problems in flight are solved once. Infeasible is an answer too. `Idempotency-Key` makes a repeated POST
    the same request.
    """
    context: Context = request.app.state.context
    begun = time.perf_counter()
    async with body_of(request) as sent:
        retry = _retry(request, sent.digest)
        held = None if retry is not None else await _held(context, caller, sent.digest, None, begun)
        if held is not None:
            return held
        async with context.locks.of(caller.tenant_id + sent.digest.hex()):  # of a burst, one looks into the store
            held = await _held(context, caller, sent.digest, retry, begun)
            if held is not None:
                return held
            subjects: KnownSubjects = request.app.state.known_subjects
            ask = await subjects.read(caller.tenant_id, sent, context.settings)
            taken = await Submission(context, caller, ask, retry).take()
    seconds = context.metrics.miss_seconds if taken.waits else context.metrics.hit_seconds
    seconds.observe(time.perf_counter() - begun)
    if taken.answer is not None:
        return final(taken.answer)
    wait_s = preferred_wait(request)
    if taken.queued is not None and not wait_s:
        return under_way(context, f"/v1/solves/{taken.id}", taken.queued())
    return await answered(context, caller, taken.id, wait_s, taken.waits)


async def _post_directly(request: Request) -> Response:
    return await post_solve(request, await solver(request))


_WAYS[post_solve] = _post_directly


async def _held(context: Context, caller: Caller, digest: bytes, retry: Retry | None, begun: float) -> Response | None:
    """The answer to a body of this SHA-256 from memory."""
    held = await context.response_cache.get(caller, digest, retry)
    if held is None:
        return None
    context.metrics.cache.labels("hit").inc()
    context.metrics.recalls.labels("body").inc()
    context.metrics.hit_seconds.observe(time.perf_counter() - begun)
    return final(held)


def _retry(request: Request, digest: bytes) -> Retry | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= 200:
        raise BadRequest("Idempotency-Key must have 1 to 200 characters")
    return Retry(key, digest.hex())


@router.get("", summary="List solves, newest first", response_model=SolveList, responses=refusals())
async def list_solves(
    context: Here,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[str | None, Query(pattern=ID.pattern, description="Go on behind this id.")] = None,
    status: Annotated[list[Status] | None, Query(description="Only these; may be given several times.")] = None,
    search: Annotated[str, Query(max_length=200, description="Only ids that begin so, and methods with it.")] = "",
    group: Annotated[
        str | None, Query(pattern=ID.pattern, description="Only those of this sweep or batch search.")
    ] = None,
    fold: Annotated[bool, Query(description="One row for each sweep or batch search: its newest.")] = False,
    sort: Annotated[Literal[SORTS], Query(description="What to sort by.")] = "created_at",  # type: ignore[valid-type]
    order: Annotated[Literal["desc", "asc"], Query(description="Largest first, or last.")] = "desc",
) -> Any:
    """The tenant's requests, a page at a time, without plans.

    `plain_peak_bytes`, what plain training needs, is null before the first solve of its graph.
    """
    chosen = Selection(tuple(status or ()), search.strip(), group, fold, sort, order == "desc")
    return await list_requests(context, caller, chosen, limit, after)


@router.get(
    "/{solve_id}",
    summary="Poll a solve",
    response_model=AnswerDocument,
    responses={202: {"model": AnswerDocument, "description": "Still under way."}, **refusals(404, 410)},
)
async def get_solve(request: Request, solve_id: SolveId, caller: Reader, wait: Wait = 0.0) -> Response:
    """The answer of a request; held for up to `wait` seconds while it is under way."""
    return await answered(request.app.state.context, caller, solve_id, wait)


async def _get_directly(request: Request) -> Response | None:
    solve_id = request.path_params["solve_id"]
    if request.scope["query_string"] or not ID.fullmatch(solve_id):
        return None
    return await get_solve(request, solve_id, await reader(request))


_WAYS[get_solve] = _get_directly


@router.post(
    "/{solve_id}/cancel",
    summary="Give a solve up",
    response_model=AnswerDocument,
    responses=refusals(404, 408, 410, 413, 415),
)
async def cancel_solve(request: Request, context: Here, solve_id: SolveId, caller: Solver) -> Response:
    """Detach this request; the answer is the best incumbent. A shared solve ends with its last request."""
    await no_body(request)
    await cancel(context, caller, solve_id)
    return await answered(context, caller, solve_id, 0.0)


@router.get(
    "/{solve_id}/problem",
    summary="The problem of a solve",
    response_model=ProblemOut,
    response_model_exclude_none=True,
    responses=refusals(404, 410),
)
async def get_problem(
    context: Here,
    solve_id: SolveId,
    caller: Reader,
    graph: Annotated[
        Literal["remat-graph/1", "node-link"], Query(description="How to write a graph.")
    ] = "remat-graph/1",
) -> Response:
    """What was asked, as stored: no names. As node-link data where each op makes one value."""
    text = await read.problem_of(context, caller, solve_id, graph == "node-link")
    return Response(text, media_type="application/json")


@router.get(
    "/{solve_id}/timeline",
    summary="Memory over the steps of a solve's plan",
    response_model=TimelineDocument,
    responses=refusals(404, 410),
)
async def get_timeline(context: Here, solve_id: SolveId, caller: Reader) -> Any:
    """What runs when and what it holds, of any kind of plan, next to training without a plan; for pictures."""
    return await read.timeline_of(context, caller, solve_id)


@router.get(
    "/{solve_id}/progress",
    summary="The improvements of a solve",
    response_model=ProgressList,
    responses=refusals(404),
)
async def get_progress(
    context: Here,
    solve_id: SolveId,
    caller: Reader,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="Only those with a greater seq.")] = 0,
) -> Any:
    """Incumbent and bound over time."""
    row = await read.find_request(context, caller, solve_id)
    return {"id": solve_id, "progress": await read.progress_of(context, row, after)}


@router.get(
    "/{solve_id}/events",
    summary="Watch a solve",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"schema": EVENT}}, "description": "Server-sent events."},
        **refusals(404),
    },
)
async def get_events(
    request: Request,
    context: Here,
    solve_id: SolveId,
    caller: Reader,
    last_event_id: Annotated[int, Header(ge=0, le=2**31 - 1, description="Go on after this event.")] = 0,
) -> Response:
    """`progress` events with incumbent and bound, then `end`; come back with Last-Event-ID, or poll."""
    await read.find_request(context, caller, solve_id)  # refused here, before the stream begins
    who = partial(request.app.state.callers.of, *credentials(request))
    admit(request, request.app.state.streams, caller)
    stream = event_stream(context, who, solve_id, last_event_id)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def event_stream(
    context: Context, who: Callable[[], Awaitable[Caller]], request_id: str, after: int
) -> AsyncIterator[bytes]:
    """Events above `after`, as they come: `progress` with its seq as id, then `end` with the answer but its plan.

    `who` is asked every second, so that a stream ends with its key, or once the request is found no more.
    """
    yield b"retry: 1000\n\n"
    quiet_since = context.clock.monotonic()
    try:
        row = await read.find_request(context, await who(), request_id)
    except ServiceError:
        return
    with context.notifier.subscribe(request_id, *([row.solve_id] if row.solve_id else [])) as changes:
        changed = True
        while True:
            try:
                caller = await who()
                if changed or row.epoch < caller.epoch:
                    changes.reset()
                    row = await read.find_request(context, caller, request_id)
            except ServiceError:
                return
            if changed:
                for point in await read.progress_of(context, row, after):
                    after = point["seq"]
                    yield event_text("progress", point, after)
                    quiet_since = context.clock.monotonic()
                if row.ended:
                    yield event_text("end", read.listed_answer(context, row), after)
                    return
            if context.leaving:
                return  # the client comes back with Last-Event-ID
            if context.clock.monotonic() - quiet_since >= _ALIVE_S:
                yield b": alive\n\n"
                quiet_since = context.clock.monotonic()
            changed = await changes.wait(_KEY_S)


def event_text(name: str, data: Any, number: int) -> bytes:
    """One event in the format of the HTML standard."""
    text = json.dumps(data, separators=(",", ":"))
    return f"id: {number}\nevent: {name}\ndata: {text}\n\n".encode()


@router.put(
    "/{solve_id}/run",
    summary="Report a run by the plan",
    status_code=204,
    responses=refusals(404, 408, 413, 415),
    openapi_extra=body(RUN_REPORT, examples()["run"]),
)
async def put_run(request: Request, context: Here, solve_id: SolveId, caller: Solver) -> None:
    """What a step by the plan was measured to take; a later report takes the place of an earlier one."""
    said = await read_document(request, RUN_REPORT)
    await attach(context, caller, solve_id, "run", said)


@router.put(
    "/{solve_id}/names",
    summary="Name the ops",
    status_code=204,
    responses=refusals(404, 408, 413, 415),
    openapi_extra=body(OP_NAMES, examples()["names"]),
)
async def put_names(request: Request, context: Here, solve_id: SolveId, caller: Solver) -> None:
    """Names of ops, for who looks at the plan; refused (403) unless an operator lets this tenant store them."""
    said = await read_document(request, OP_NAMES)
    await attach(context, caller, solve_id, "names", said)


@router.get(
    "/{solve_id}/attachments",
    summary="What a job has said",
    response_model=AttachmentsDocument,
    responses=refusals(404),
)
async def get_attachments(context: Here, solve_id: SolveId, caller: Reader) -> Any:
    """The run by the plan as it was reported, and the names of the ops; null where there is none."""
    return await attached(context, caller, solve_id)
