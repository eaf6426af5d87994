"""PostgreSQL for the tests: the one that is there, or a private one; never skipped in silence."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

DEFAULT = "postgresql://postgres@127.0.0.1:5432/postgres"


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """The URL of a fresh, empty database, dropped at the end."""
    server = os.environ.get("REMAT_TEST_DATABASE_URL", DEFAULT)
    if _answers(server):
        with fresh_database(server) as url:
            yield url
    else:
        with PrivatePostgres(folder) as private, fresh_database(private.url) as url:
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


class PrivatePostgres:
    """A PostgreSQL server of the test's own, which it may stop and start."""

    def __init__(self, folder: Path) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        initdb = str(found[-1]) if found else shutil.which("initdb")
        if initdb is None:
            pytest.fail("no PostgreSQL answers and there is none to start: set REMAT_TEST_DATABASE_URL")
        self._bin = Path(initdb).parent
        self._data = folder / "postgres"
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self.port = _free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> PrivatePostgres:
        if self._as:  # PostgreSQL refuses to run as root
            for parent in (self._data.parent, *self._data.parents[1:3]):
                parent.chmod(0o755)
            self._data.mkdir()
            shutil.chown(self._data, "postgres")
        self._run("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "--no-sync")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -k '' -c fsync=off"
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._data / "log"), "-w", "-o", options, "start")

    def stop(self) -> None:
        """Stop it, breaking every connection."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._bin / program), *arguments]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, cwd="/")
        assert done.returncode == 0, command


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
