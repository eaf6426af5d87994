"""How routes describe themselves: bodies by schema, refusals by status."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from remat_ir.schema import COMPONENTS, Document, OneOf

from ...errors import KINDS
from ..schemas import Problem


def body(document: Document | OneOf, example: Any = None) -> dict[str, Any]:
    """`openapi_extra` for a JSON body that the route reads by itself."""
    content: dict[str, Any] = {"schema": {"$ref": COMPONENTS + document.name}}
    if example is not None:
        content["example"] = example
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
    by_status = {kind.status: kind for kind in KINDS.values()}
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*common, *statuses}):
        kind = by_status.get(status)
        title = "The service failed" if kind is None else kind.title
        slug = "internal" if kind is None else kind.slug
        example = {"type": f"urn:remat:problem:{slug}", "title": title, "status": status, "detail": title + "."}
        found[status] = {
            "model": Problem,
            "description": title,
            "content": {"application/problem+json": {"example": example}},
        }
    return found


def link(operation: str, parameter: str) -> dict[str, Any]:
    """OpenAPI's way to say that an id in this response goes into that route."""
    return {"links": {operation: {"operationId": operation, "parameters": {parameter: "$response.body#/id"}}}}


@cache
def examples() -> dict[str, Any]:
    """The examples of the OpenAPI document, which the tests send."""
    found: dict[str, Any] = json.loads(files("remat_service.web").joinpath("examples.json").read_text())
    return found
