"""How routes describe themselves for OpenAPI: bodies by schema, refusals by status, and what the service alone writes.

A generator of clients, or a fuzzer, may rely on it. Documents that are read, by the service or by its clients, are
declared where they are read, with `remat_ir.document`; those among them that a route returns stand here under their
names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, RootModel

from remat_ir import ANSWER
from remat_ir.document import COMPONENTS, AnyInteger, Document, Member, Nested, Text

from ..errors import KINDS, kind_of
from ..requests.operate import SolveOfAll
from ..requests.parse import OneOf


class AnswerDocument(RootModel[dict[str, Any]]):
    """The answer to a solve: `remat_ir.answer.ANSWER`."""


GROUP = Document(
    "GroupOfRequests",
    "group",
    "The sweep or batch search that a request is part of, and what it has come to; a search has `bound`.",
    {
        "id": Member(Text()),
        "kind": Member(Text(words=("sweep", "max-batch"))),
        "requests": Member(AnyInteger()),
        "ended": Member(AnyInteger()),
        "planned": Member(AnyInteger()),
        "least_budget_bytes": Member(AnyInteger()),
        "most_budget_bytes": Member(AnyInteger()),
        "best_batch": Member(AnyInteger(), nullable=True),
        "bound": Member(AnyInteger(), nullable=True),
    },
    open=True,
)

SOLVE_ROW = ANSWER.extended(
    "SolveRow",
    "An answer in a list, with its name, its problem's size and plain peak, when it was asked for, and its sweep.",
    name=Member(Text(), nullable=True),
    ops=Member(AnyInteger(), nullable=True),
    joined=Member(AnyInteger()),
    created_at=Member(Text()),
    plain_peak_bytes=Member(AnyInteger(), nullable=True),
    group=Member(Nested((GROUP,)), nullable=True),
)

DECLARED: list[Document | OneOf] = [ANSWER, SOLVE_ROW]
"""The documents that schemas of the interface are made of: of answers, and of the bodies of routes (`body`)."""


class SolveRow(RootModel[dict[str, Any]]):
    """An answer in a list: `SOLVE_ROW`."""


class SolveList(BaseModel):
    """A page of solves, newest first; `next` is the `after` of the next page."""

    solves: list[SolveRow]
    next: str | None


class ProgressPoint(BaseModel):
    """One improvement of a running solve."""

    seq: int
    seconds: float
    cost_ns: int | None
    bound_ns: int | None
    restricted_to: list[str]
    source: str


class ProgressList(BaseModel):
    """A solve's improvements in order."""

    id: str
    progress: list[ProgressPoint]


class ProblemOut(BaseModel):
    """A problem as it was asked: one of graph, chain, join, and its budget."""

    graph: dict[str, Any] | None = None
    chain: dict[str, Any] | None = None
    join: dict[str, Any] | None = None
    budget_bytes: int


class Curve(BaseModel):
    """Memory over the steps: when each starts, the bytes while it runs, what it is, and whether it has run before."""

    start_ns: list[int]
    end_ns: int
    memory_bytes: list[int]
    what: list[str]
    again: list[bool]


class TimelineDocument(BaseModel):
    """The memory curve of a solve's plan, and of training without rematerialization."""

    kind: Literal["graph", "chain", "join"]
    total_cost_ns: int
    plain: Curve
    plan: Curve | None


class RunDocument(BaseModel):
    """A training step by a solve's plan, as a job measured it; null where it was not."""

    predicted_bytes: int
    measured_bytes: int
    predicted_ns: int | None
    measured_ns: int | None
    device: str | None
    created_at: str


class NamesDocument(BaseModel):
    """What the ops of a solve's graph are called, and where in the model's code they stand."""

    names: list[str]
    where: list[str] | None
    created_at: str


class AttachmentsDocument(BaseModel):
    """What a job has said of a solve; null where it has not."""

    run: RunDocument | None
    names: NamesDocument | None


class SweepDocument(BaseModel):
    """A group of solves; `ended` once all have."""

    id: str
    ended: bool
    solves: list[AnswerDocument]


class BatchDocument(SweepDocument):
    """The batches tried in order, and the largest with a plan so far; a search has a bound above which there is none.

    `best_solve` is the solve whose plan it is, `most_cost_ns` what a plan may cost at the batch of the capture.
    """

    batches: list[int]
    best_batch: int | None
    bound: int | None
    best_solve: str | None
    most_cost_ns: int | None
    message: str


class ValidateDocument(BaseModel):
    """What a valid graph, chain or join is."""

    kind: Literal["graph", "chain", "join"]
    digest: str
    structure_digest: str
    ops: int
    edges: int
    total_cost_ns: int
    fixed_bytes: int
    plain_peak_bytes: int
    least_budget_bound_bytes: int
    model_entries: int


class ExplainDocument(BaseModel):
    """What the store has for a request, and what it misses by."""

    result: Literal["hit", "near", "miss"]
    digest: str
    reasons: list[str]


class ProfileTable(BaseModel):
    """Signature → [ns, workspace bytes]."""

    profiles: dict[str, list[int]]


class MethodDocument(BaseModel):
    """A method that solves can ask for."""

    name: str
    summary: str
    takes: list[str]
    options: dict[str, Any]
    restricted_to: list[str]


class Capabilities(BaseModel):
    """What this service does, its limits, and who asks: the tenant, its scopes, and the group that shares with it.

    `stores_names` says whether names of this tenant's ops are stored.
    """

    version: str
    tenant: str
    group: str | None
    stores_names: bool
    scopes: list[str]
    formats: list[str]
    methods: list[MethodDocument]
    limits: dict[str, float]


class Health(BaseModel):
    """Whether the service is well."""

    status: str


class Problem(BaseModel):
    """A refusal (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    pointer: str | None = None
    issuer: str | None = None


class SolvesOfAll(BaseModel):
    """Solves of all tenants, newest first."""

    solves: list[SolveOfAll]


class Ended(BaseModel):
    """How many requests were ended."""

    requests: int


class TenantRow(BaseModel):
    """A tenant, its weight and its quotas; null is no limit."""

    name: str
    weight: float
    disabled: bool
    store_names: bool
    most_running: int | None
    most_queued: int | None
    most_solver_seconds: float | None
    most_stored_bytes: int | None
    most_requests: int | None
    most_profiles: int | None


class TenantList(BaseModel):
    """Every tenant."""

    tenants: list[TenantRow]


class KeyRow(BaseModel):
    """An API key without its secret."""

    id: str
    tenant: str
    label: str
    prefix: str
    scopes: list[str]
    expires_at: str | None
    revoked: bool


class KeyList(BaseModel):
    """Every API key."""

    keys: list[KeyRow]


class KeyMade(BaseModel):
    """A new key, shown this once."""

    id: str
    key: str


def with_nested(documents: Iterable[Document | OneOf]) -> dict[str, Document | OneOf]:
    """These documents and all that their schemas refer to, by name."""
    found: dict[str, Document | OneOf] = {}
    for document in documents:
        if document.name not in found:
            found |= {document.name: document, **with_nested(document.nested)}
    return found


def body(document: Document | OneOf, example: Any) -> dict[str, Any]:
    """`openapi_extra` for a JSON body that the route reads by itself."""
    DECLARED.append(document)
    content = {"schema": {"$ref": COMPONENTS + document.name}, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def headers(**described: tuple[dict[str, Any], str]) -> list[dict[str, Any]]:
    """The `parameters` of `openapi_extra` for headers that the route reads by itself: a schema and a sentence each."""
    return [
        {"name": name.replace("_", "-"), "in": "header", "required": False, "schema": schema, "description": what}
        for name, (schema, what) in described.items()
    ]


def refusals(*statuses: int, keyed: bool = True) -> dict[int | str, dict[str, Any]]:
    """`responses` for the refusals of a route, each with an example.

    Args:
        keyed: it asks for an API key, and counts what its tenant asks.
    """
    common = (400, 401, 403, 406, 422, *([429] if keyed else []), 500, 503)
    by_status = {kind.status: kind for kind in (*KINDS.values(), kind_of(Exception()))}
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*common, *statuses}):
        kind = by_status[status]
        title = kind.title
        example = {"type": f"urn:remat:problem:{kind.slug}", "title": title, "status": status, "detail": title + "."}
        found[status] = {
            "model": Problem,
            "description": title,
            "content": {"application/problem+json": {"example": example}},
        }
    return found


def asked(
    model: type[BaseModel], operation: str, parameter: str, *statuses: int, under_way: str = "Under way."
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers at once or later, its id linked to the operation that polls for it."""
    link = {"links": {operation: {"operationId": operation, "parameters": {parameter: "$response.body#/id"}}}}
    return {200: link, 202: {"model": model, "description": under_way, **link}, **refusals(*statuses)}


@cache
def examples() -> dict[str, Any]:
    """The examples of the OpenAPI document, which the tests send."""
    found: dict[str, Any] = json.loads(files("remat_service.web").joinpath("examples.json").read_text())
    return found
