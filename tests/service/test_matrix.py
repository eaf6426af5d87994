"""One contract for every deployment: both dispatchers, both databases (SQLite has the embedded one alone)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from remat_ir import Problem
from service.database import PrivatePostgres, fresh_database
from service.serving import (
    SHORT,
    Service,
    Worker,
    all_answered,
    at_peak,
    checked,
    eventually,
    given_up,
    hard_graph,
    long_solve,
    posed,
    serving,
    training_graph,
)


class Deployment:
    """A server with one place to solve, in its own children or in a worker's."""

    def __init__(self, folder: Path, dispatcher: str, url: str, server: Service, own: PrivatePostgres | None) -> None:
        self.dispatcher, self.url, self.server = dispatcher, url, server
        self._folder, self._postgres = folder, own
        self.worker = Worker(folder, url, **SHORT) if dispatcher == "cluster" else None

    def kill_worker(self) -> None:
        """SIGKILL of whatever runs the solves, and another in its place."""
        if self.worker is not None:
            self.worker.stop(signal.SIGKILL)
            self.worker = Worker(self._folder, self.url, **SHORT)
        else:
            self.server.stop(signal.SIGKILL)
            self.server.start()

    def restart_database(self) -> None:
        """Stop it at once, breaking every connection; SQLite lives in its process, which is killed."""
        if self._postgres is None:
            self.kill_worker()
            return
        self._postgres.stop()
        eventually(lambda: self.server.http.get("/readyz").status_code == 503, 10)  # it looks once a second
        time.sleep(1)
        self._postgres.start()
        eventually(lambda: self.server.http.get("/readyz").status_code == 200, 30)

    def close(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.stop()


@pytest.fixture(
    scope="module",
    params=[
        "embedded-sqlite",
        pytest.param("embedded-postgresql", marks=pytest.mark.slow),
        "cluster-postgresql",
    ],
)
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Each deployment in turn, on a database that may be restarted."""
    dispatcher, database = request.param.split("-")
    folder = tmp_path_factory.mktemp("matrix")
    with ExitStack() as stack:
        own, url = None, f"sqlite:///{folder}/service.sqlite"
        if database == "postgresql":
            own = stack.enter_context(PrivatePostgres())
            url = stack.enter_context(fresh_database(own.url))
        server = stack.enter_context(serving(folder, database_url=url, dispatcher=dispatcher, workers=1, **SHORT))
        deployment = Deployment(folder, dispatcher, url, server, own)
        stack.callback(deployment.close)
        yield deployment


def _cancel(server: Service, row: dict[str, Any]) -> dict[str, Any]:
    reply = server.http.post(f"/v1/solves/{row['id']}/cancel")
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


def _quick(seed: int) -> Problem:
    return at_peak(training_graph(4 + seed, cost=900 + seed))


@pytest.mark.thorough
def test_order_cancel_join_and_last_subscriber(deployed: Deployment) -> None:
    """With the one place taken: queued by priority, a queued one cancelled, a running one shared, then left by all."""
    server = deployed.server
    problem, first = long_solve(server, 1)
    low = server.post(_quick(1), wait=0, time_limit_s=5, priority=-5)[1]
    high = server.post(_quick(2), wait=0, time_limit_s=5, priority=5)[1]
    dropped = server.post(_quick(3), wait=0, time_limit_s=5, priority=50)[1]
    assert {row["status"] for row in (low, high, dropped)} == {"queued"}
    assert _cancel(server, dropped)["status"] == "cancelled"
    late = server.post(_quick(4), wait=0, time_limit_s=5, queue_limit_s=0.2)[1]
    ended = eventually(lambda: (found := server.get(late["id"], 0))[0] == 200 and found[1])
    assert (ended["status"], ended["limit"], "queue" in ended["message"]) == ("nothing_found", "time", True)

    start = _start_of(server, first)
    again = server.post(problem, wait=0, method="staged", time_limit_s=90, max_gap=0, start=start)[1]
    assert again["cache"] == "joined"
    ended = _cancel(server, first)
    assert ended["status"] == "cancelled"
    checked(problem, ended)  # the best incumbent, with its plan
    assert server.get(again["id"], 0)[1]["status"] == "running"  # goes on for the other
    _cancel(server, again)  # the last one: the place is free
    assert server.get(low["id"], 30)[0] == 200
    assert server.get(high["id"], 0)[0] == 200  # the urgent one had ended before
    assert server.get(dropped["id"], 0)[1]["status"] == "cancelled"
    assert server.metric("remat_queue_depth") == 0


def _start_of(server: Service, row: dict[str, Any]) -> str:
    """The id that a long solve was told to start from: the request before it."""
    rows = server.http.get("/v1/solves", params={"limit": 200}).json()["solves"]
    return str(next(r["id"] for r in rows if r["method"] == "greedy" and r["digest"] == row["digest"]))


@pytest.mark.slow
def test_database_restarted(deployed: Deployment) -> None:
    """Twice, under load: no request lost, none wrong, and the solve under way goes on."""
    server = deployed.server
    problem, long = long_solve(server, 3)
    posted = {}
    for i in range(9):
        if i in (3, 6):
            deployed.restart_database()
        status, data = server.post(_quick(20 + i), wait=0, time_limit_s=5)
        assert status in (200, 202), data
        posted[data["id"]] = _quick(20 + i)
    given_up(server, problem, long)
    all_answered(server, posted, 300)


@pytest.mark.thorough
def test_identical_posts_are_solved_once(deployed: Deployment) -> None:
    """Thirty at once, whatever queues and whatever solves them: one solve, equal answers under thirty ids."""
    problem = posed(hard_graph(12, 5), 0.8)
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda _: deployed.server.post(problem, time_limit_s=10), range(30)))
    assert {status for status, _ in replies} == {200}
    assert len({data["id"] for _, data in replies}) == 30
    assert len({(data["status"], data["cost_ns"], str(data["plan"])) for _, data in replies}) == 1
    caches = [data["cache"] for _, data in replies]
    assert caches.count("miss") == 1
    assert set(caches) <= {"miss", "joined", "hit"}
