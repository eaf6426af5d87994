"""The OpenAPI document: generated from the routes, completed with the schemas of bodies that routes read themselves."""

from __future__ import annotations

from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from . import schemas

_BODIES: tuple[type[BaseModel], ...] = (
    schemas.SolveRequest,
    schemas.SweepRequest,
    schemas.BatchRequest,
    schemas.ValidateRequest,
    schemas.ProfileLookup,
    schemas.ProfileUpload,
)


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        found = get_openapi(
            title="remat",
            version="1",
            summary="Optimal tensor rematerialization as a service.",
            description="Plans for training steps inside a memory budget: solved once, verified, kept and shared.",
            routes=app.routes,
        )
        _, definitions = models_json_schema(
            [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
        )
        components = found.setdefault("components", {})
        components.setdefault("schemas", {}).update(definitions.get("$defs", {}))
        components["schemas"].pop("HTTPValidationError", None)
        components["schemas"].pop("ValidationError", None)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}, {}]
        _only_problems(found)
        app.openapi_schema = found
    return app.openapi_schema


def _only_problems(found: dict[str, Any]) -> None:
    """Refusals are `application/problem+json` and nothing else."""
    for path in found["paths"].values():
        for operation in path.values():
            for status, response in operation.get("responses", {}).items():
                content = response.get("content", {})
                if status >= "400" and "application/problem+json" in content:
                    schema = content.pop("application/json", {}).get("schema")
                    if schema is not None:
                        content["application/problem+json"]["schema"] = schema


def as_yaml(app: FastAPI) -> str:
    """The document as it is committed."""
    text: str = yaml.safe_dump(describe(app), sort_keys=False, allow_unicode=True, width=120)
    return text
