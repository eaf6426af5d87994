"""PostgreSQL for the tests: the one that is there, or a private one; never skipped in silence."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from benchmarks.harness.postgres import PrivatePostgres
from psycopg.conninfo import make_conninfo

DEFAULT = "postgresql://postgres@127.0.0.1:5432/postgres"


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a fresh, empty database, dropped at the end."""
    server = os.environ.get("REMAT_TEST_DATABASE_URL", DEFAULT)
    if _answers(server):
        with fresh_database(server) as url:
            yield url
    else:
        with PrivatePostgres() as private, fresh_database(private.url) as url:
            yield url


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


def _answers(url: str) -> bool:
    try:
        psycopg.connect(make_conninfo(url, connect_timeout=3)).close()
    except psycopg.OperationalError:
        return False
    return True
