"""What the service refuses, and the one table from refusal to HTTP status (RFC 9457)."""

from __future__ import annotations

from dataclasses import dataclass

from remat_ir import InvalidData, InvalidPlan


class ServiceError(Exception):
    """Something that the service refuses, in one line; `pointer` leads into the request's body."""

    def __init__(self, detail: str, pointer: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.pointer = pointer
        self.retry_after_s = retry_after_s


class BadRequest(ServiceError):
    """Not JSON, or headers that can't be understood."""


class Unauthorized(ServiceError):
    """An API key is needed, or a token of `issuer` where there is one."""

    def __init__(self, detail: str, issuer: str | None = None) -> None:
        super().__init__(detail)
        self.issuer = issuer


class Forbidden(ServiceError):
    """A key without the scope, or a tenant that has been disabled."""


class NotFound(ServiceError):
    """There is nothing for this caller."""


class WrongMethod(ServiceError):
    """The route takes other methods."""


class NotAcceptable(ServiceError):
    """No representation that the caller accepts."""


class Gone(ServiceError):
    """It was here and has been evicted."""


class Conflict(ServiceError):
    """The state of things forbids it."""


class TooLarge(ServiceError):
    """Over a cap on bytes, ops or edges."""


class TooSlow(ServiceError):
    """The body did not come in time."""


class Unsupported(ServiceError):
    """A content type or encoding that the service does not read."""


class Invalid(ServiceError):
    """Understood, and wrong; the pointer says where."""


class RateLimited(ServiceError):
    """Over a quota; says when to come back."""


class Unavailable(ServiceError):
    """Stopping, or the queue is full."""


@dataclass(frozen=True)
class Kind:
    """How a refusal looks on the wire."""

    status: int
    slug: str
    title: str


KINDS: dict[type[Exception], Kind] = {
    BadRequest: Kind(400, "bad-request", "The request can't be understood"),
    Unauthorized: Kind(401, "unauthorized", "An API key is needed"),
    Forbidden: Kind(403, "forbidden", "This API key may not do that"),
    NotFound: Kind(404, "not-found", "There is nothing here"),
    WrongMethod: Kind(405, "wrong-method", "This route takes other methods"),
    NotAcceptable: Kind(406, "not-acceptable", "Nothing that you accept can be sent"),
    TooSlow: Kind(408, "too-slow", "The body did not come in time"),
    Conflict: Kind(409, "conflict", "The state of things forbids it"),
    Gone: Kind(410, "gone", "It was here and has been evicted"),
    TooLarge: Kind(413, "too-large", "More than the service takes"),
    Unsupported: Kind(415, "unsupported", "A content type or encoding that the service does not read"),
    Invalid: Kind(422, "invalid", "Understood, and wrong"),
    InvalidData: Kind(422, "invalid", "Understood, and wrong"),
    InvalidPlan: Kind(422, "invalid-plan", "The plan breaks a rule of its problem"),
    RateLimited: Kind(429, "too-many", "Over a quota"),
    Unavailable: Kind(503, "unavailable", "Not now"),
}


def kind_of(error: Exception) -> Kind:
    """The row of the table for an error; anything unknown is the service's own fault."""
    for cls in type(error).__mro__:
        if cls in KINDS:
            return KINDS[cls]
    return Kind(500, "internal", "The service failed")
