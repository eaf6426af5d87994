"""Errors on the wire: `application/problem+json` (RFC 9457), with a JSON pointer where the body is to blame."""

from __future__ import annotations

import json
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from remat_ir import InvalidData, InvalidPlan

from ..errors import Invalid, NotFound, ServiceError, Unauthorized, WrongMethod, kind_of

MEDIA_TYPE = "application/problem+json"


def problem_document(error: Exception) -> dict[str, Any]:
    """The problem object of an error; nothing of the service's insides is in it."""
    kind = kind_of(error)
    data: dict[str, Any] = {"type": f"urn:remat:problem:{kind.slug}", "title": kind.title, "status": kind.status}
    if isinstance(error, ServiceError):
        data["detail"] = error.detail
    elif isinstance(error, (InvalidData, InvalidPlan)):
        data["detail"] = str(error)
    else:
        data["detail"] = "The service failed; its log has the story under this request's id."
    pointer = error.pointer if isinstance(error, (ServiceError, InvalidData)) else None
    if pointer is not None:
        data["pointer"] = pointer
    if isinstance(error, Unauthorized) and error.issuer:
        data["issuer"] = error.issuer
    return data


def problem_response(error: Exception) -> Response:
    """The response to an error."""
    data = problem_document(error)
    headers = {}
    retry_after = getattr(error, "retry_after_s", None)
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    if data["status"] == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps(data), data["status"], headers, MEDIA_TYPE)


def validation_refusal(error: Exception) -> ServiceError:
    """A refused query, path or header parameter: FastAPI's first complaint in one line."""
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
    place = " ".join(str(part) for part in first["loc"])
    return Invalid(f"{place}: {first['msg']}")


def refusal_of(error: Exception) -> Response:
    """What the router itself refuses: no such route, or another method on it."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return problem_response(NotFound("there is no such route"))
    if status == 405:
        return problem_response(WrongMethod("this route takes other methods; see the header Allow"))
    headers = getattr(error, "headers", None) or {}
    detail = str(getattr(error, "detail", error))
    data = {"type": "about:blank", "title": detail, "status": status, "detail": detail}
    return Response(json.dumps(data), status, headers, MEDIA_TYPE)
