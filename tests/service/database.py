"""Databases for the tests, and a process of the service over one.

PostgreSQL is the one that is there, or a private one for all tests of a process; never skipped in silence.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import psycopg
from benchmarks.harness.postgres import PrivatePostgres
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from remat_ir import Problem
from remat_service.context import Context
from remat_service.identity import Caller
from remat_service.requests.parse import Ask
from remat_service.requests.read import find_request
from remat_service.requests.submit import Submission
from remat_service.settings import Settings
from remat_service.storage.database import migrate
from remat_service.tenants.keys import default_caller

DEFAULT = "postgresql://postgres@127.0.0.1:5432/postgres"


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a fresh, empty database, dropped at the end."""
    with fresh_database(_server()) as url:
        yield url


@cache
def _server() -> str:
    """The URL of the server that is there, or of one that runs until `stop_server`."""
    server = os.environ.get("REMAT_TEST_DATABASE_URL", DEFAULT)
    return server if _answers(server) else _PRIVATE.enter_context(PrivatePostgres()).url


_PRIVATE = ExitStack()
stop_server = _PRIVATE.close


@contextmanager
def fresh_database(server: str) -> Iterator[str]:
    """A database of its own on a server."""
    name = f"remat_test_{os.getpid()}_{time.time_ns()}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    try:
        yield server.rsplit("/", 1)[0] + "/" + name
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def process(url: str, **settings: Any) -> AsyncIterator[Context]:
    """A process of the service over a database, which it has brought up to date, and which solves nothing by itself."""
    context = Context(Settings(database_url=SecretStr(url), **settings))
    try:
        await migrate(context.database)
        yield context
    finally:
        await context.supervisor.close()
        await context.write_behind.close()
        await context.database.close()


def _answers(url: str) -> bool:
    try:
        psycopg.connect(make_conninfo(url, connect_timeout=3)).close()
    except psycopg.OperationalError:
        return False
    return True


async def default_tenant(context: Context) -> Caller:
    """Who asks where no keys are required."""
    async with context.database.write() as connection:
        return await default_caller(connection)


async def queued(context: Context, caller: Caller, problem: Problem, **more: Any) -> str:
    """The id of a solve that waits, written as a server writes it; its method takes no time."""
    ask = Ask(problem, time_limit_s=5, method="checkpoint-all", **more)
    request_id = await Submission(context, caller, ask).submit()
    return str((await find_request(context, caller, request_id)).solve_id)


def request_row(context: Context, caller: Caller, **more: Any) -> dict[str, Any]:
    """A row of `requests` about a graph that is not there."""
    plain = dict.fromkeys(("graph_key", "digest"), "") | dict.fromkeys(("fixed_bytes", "max_gap", "priority"), 0)
    named = {"tenant_id": caller.tenant_id, "method": "auto", "method_key": "auto", "budget_bytes": 1}
    return plain | named | {"time_limit_s": 1.0, "created_at": context.clock.now(), **more}
