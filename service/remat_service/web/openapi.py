"""The OpenAPI document: generated from the routes, completed with what is declared where it is read."""

from __future__ import annotations

from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from remat_ir import ANSWER
from remat_ir.schema import Document, OneOf, with_nested

from ..requests.batches import BATCH_REQUEST
from ..requests.groups import SWEEP_REQUEST
from ..requests.parse import CHECK_REQUEST, SOLVE_REQUEST
from ..requests.profiles import LOOKUP, UPLOAD
from .routes.operate import KEY_REQUEST, TENANT_CHANGE, TENANT_REQUEST
from .schemas import SOLVE_ROW

_DECLARED: tuple[Document | OneOf, ...] = (
    ANSWER, SOLVE_ROW, SOLVE_REQUEST, SWEEP_REQUEST, BATCH_REQUEST, CHECK_REQUEST, LOOKUP, UPLOAD,
    TENANT_REQUEST, TENANT_CHANGE, KEY_REQUEST
)  # fmt: skip


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
        components = found.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas.update({name: document.schema() for name, document in with_nested(_DECLARED).items()})
        unused = ("HTTPValidationError", "ValidationError")
        components["schemas"] = {name: schemas[name] for name in sorted(schemas) if name not in unused}
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
