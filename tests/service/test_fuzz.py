"""The OpenAPI document against the running service: schemathesis, all checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.database import postgres
from service.serving import Service, Worker, serving


@pytest.fixture(scope="module", params=["embedded", pytest.param("cluster", marks=pytest.mark.slow)])
def brief(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose solves are short: alone on SQLite, and with a worker on PostgreSQL."""
    folder = tmp_path_factory.mktemp("brief")
    with ExitStack() as stack:
        more: dict[str, str] = {}
        if request.param == "cluster":
            more["database_url"] = stack.enter_context(postgres())
        running = stack.enter_context(serving(folder, dispatcher=request.param, workers=1, most_time_limit_s=1, **more))
        if more:
            stack.callback(Worker(folder, more["database_url"], most_time_limit_s=1).stop)
        yield running


def _fuzz(service: Service, *arguments: str) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "schemathesis"),
            "--config-file",
            str(Path(__file__).parent / "schemathesis.toml"),
            "run",
            f"http://127.0.0.1:{service.port}/openapi.json",
            "--checks=all",
            "--seed=1",
            "--generation-database=none",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=service.folder,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.thorough
def test_examples(brief: Service) -> None:
    """Every example of the document is accepted and answered as described."""
    _fuzz(brief, "--phases=examples")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything(brief: Service) -> None:
    """Boundary values, random bodies, and sequences of calls."""
    _fuzz(brief, "--max-examples=40")
