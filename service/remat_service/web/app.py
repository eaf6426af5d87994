"""The application wired together: settings in, an ASGI application out; and its OpenAPI document.

The document is generated from the routes and completed with what is declared where it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any

import yaml
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from remat_ir import InvalidData, InvalidPlan

from ..context import Context
from ..errors import ServiceError
from ..requests.completion import housekeeping, poll
from ..requests.groups import BatchSearches
from ..requests.parse import KnownSubjects
from ..settings import Settings
from ..solving.dispatch import Dispatcher, announce, opened
from .authentication import Admission, Callers
from .body import MemoryBudget
from .middleware import FOREIGN, RequestMiddleware, own, problem_response
from .routes import groups, operate, plans, profiles, service, solves
from .schemas import DECLARED, with_nested

_ROUTERS = (
    solves.router, groups.router, plans.router, plans.graphs_router, profiles.router,
    service.router, operate.router, service.page_router,
)  # fmt: skip
LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


def create_app(settings: Settings) -> FastAPI:
    """The service as an application; its lifespan opens the database and starts the dispatcher."""
    context = Context(settings)
    app = FastAPI(
        title="remat",
        version="1",
        summary="Optimal tensor rematerialization as a service.",
        description="Plans for training steps inside a memory budget: solved once, verified, kept and shared.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=attrgetter("name"),
    )
    app.state.context, app.state.callers = context, Callers(context)
    app.state.admission = Admission(settings.most_requests_per_tenant, rate=settings.most_rate_per_tenant)
    app.state.streams = Admission(settings.most_streams_per_tenant, "event streams")
    app.state.batch_searches = BatchSearches(context)
    app.state.bodies, app.state.known_subjects = MemoryBudget(settings.most_bodies_bytes), KnownSubjects()
    for router in _ROUTERS:
        app.include_router(router)
    app.mount("/static", service.Files(directory=service.FILES))
    for refused in (ServiceError, InvalidData, InvalidPlan, *FOREIGN):
        app.add_exception_handler(refused, _refuse)
    app.add_middleware(RequestMiddleware, metrics=context.metrics, hosts=_hosts(settings))
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    async with opened(context):
        dispatcher = Dispatcher(context)
        if context.settings.embedded:
            dispatcher.start()
        # other processes share the database, whose notes may be lost; a command on a SQLite file sends none
        keepers = [asyncio.create_task(keeper(context)) for keeper in (housekeeping, poll, service.keep_gauges)]
        try:
            await announce(context)
            yield
        finally:
            context.leave()
            await app.state.batch_searches.stop()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait_for(dispatcher.stop(), context.settings.drain_s + 10.0)


def _hosts(settings: Settings) -> frozenset[str]:
    """Host names to accept. With keys and without a list, any: a page in a browser has no key to send."""
    if settings.require_keys and not settings.allowed_hosts:
        return frozenset()
    return LOOPBACK | {settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}


def _refuse(request: Request, error: Exception) -> Response:
    response = problem_response(own(error))
    if response.status_code == 405:
        response.headers["Allow"] = ", ".join(methods_at(request.scope["path"]))
    return response


def methods_at(path: str) -> list[str]:
    """Every method of the routes at a path: a router names only those of the first. HEAD is wherever GET is."""
    found: set[str] = set()
    for router in _ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path_regex.match(path):
                found |= route.methods or set()
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        found = FastAPI.openapi(app)
        components = found.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas.update({name: document.schema() for name, document in with_nested(DECLARED).items()})
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
