"""One service shared by the tests that leave it as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from remat_ir import Graph, Problem, budget_at
from service.browsing import GRAPH, Stored, Visit
from service.database import postgres, stop_server
from service.serving import Machines, Service, serving, training_graph

collect_ignore = [] if find_spec("torch") else ["test_page_transfers.py"]
"""Its plans are made by the client, of a captured step."""
os.environ.setdefault("REMAT_LOOK_UP_S", "20")
os.environ.setdefault("REMAT_SEAL_KEY", "the key of all services that these tests start")


def pytest_sessionfinish() -> None:
    """End the database server that the tests have started for themselves."""
    stop_server()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/service.sqlite"
        return
    with postgres() as found:
        yield found


@pytest.fixture
def machines(tmp_path: Path, url: str) -> Iterator[Machines]:
    """Servers and workers over a database; none is started yet."""
    found = Machines(tmp_path, url)
    yield found
    found.end()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A running service with two solvers and a SQLite file of its own."""
    with serving(tmp_path_factory.mktemp("service"), workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; where REMAT_REQUIRE_BROWSER is set, its absence is a failure."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = os.environ.get("REMAT_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        if os.environ.get("REMAT_REQUIRE_BROWSER"):
            pytest.fail("no Chromium on the PATH; install it or set REMAT_TEST_CHROMIUM")
        pytest.skip("no Chromium on the PATH; install it or set REMAT_TEST_CHROMIUM to test the page")
    quiet = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=quiet)
        yield running
        running.close()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """Two plans of a graph, one of another, a problem without a plan, and two sweeps, one of which finds nothing."""
    with serving(tmp_path_factory.mktemp("page"), workers=1) as running:

        def solved(graph: Graph, budget: int) -> str:
            return str(running.post(Problem(graph, budget))[1]["id"])

        def sweep(method: str, *fractions: float) -> str:
            budgets = sorted((budget_at(GRAPH, f) for f in fractions), reverse=True)
            body = {"graph": GRAPH.to_json(), "budgets_bytes": budgets, "time_limit_s": 5, "method": method}
            return str(running.http.post("/v1/sweeps", json=body, headers={"Prefer": "wait=30"}).json()["id"])

        plans = solved(GRAPH, budget_at(GRAPH, 0.6)), solved(GRAPH, budget_at(GRAPH, 0.8))
        other = training_graph(7)
        sweeps = sweep("auto", 0.1, 0.6, 1), sweep("checkpoint-all", 0.6, 0.8)
        yield Stored(running, plans, solved(other, budget_at(other, 0.8)), solved(GRAPH, 1), sweeps)


@pytest.fixture
def visit(browser: Any, stored: Stored, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A tab that must end without a complaint, having asked nobody but the service."""
    here = Visit(browser, stored.service.url, *getattr(request, "param", ()))
    yield here
    here.leave()
