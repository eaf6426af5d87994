"""The client against a real service process that is killed, stalled, restarted or plugged in without a network."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from benchmarks.graphs.instances import instance
from starlette.testclient import TestClient

from client.test_target import remat_command
from remat.errors import ServiceError, Unreachable
from remat.planning import service
from remat.planning.http import Timeouts
from remat.planning.options import SolveOptions
from remat.planning.planner import CoordinatedPlanner, FallbackPlanner, planner_for
from remat.planning.profiles import Profile
from remat.planning.sources import ServicePlanner
from remat.settings import settings
from remat_ir import Answer, Graph, Problem, Progress, Status, budget_at, verify
from remat_service.settings import Settings
from remat_service.web.app import create_app
from service.serving import Service, serving

QUICK = Timeouts(connect=2.0, read=2.0, write=5.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service")) as running:
        yield running


def problem(name: str = "gpt-2-whole", fraction: float = 0.92) -> Problem:
    graph = instance(name)
    return Problem(graph, budget_at(graph, fraction))


def hard() -> Problem:
    """One that no method settles in the seconds that these tests have."""
    return problem("random-125", 0.5)


def asking(url: str, folder: Path, **more: Any) -> CoordinatedPlanner:
    here = settings(cache_dir=folder, environ={})
    return planner_for(url, given=here, timeouts=QUICK, patience_s=more.pop("patience_s", 5.0), **more)


@pytest.mark.thorough
def test_a_plan_comes_over_the_wire_and_the_next_client_shares_it(served: Service, tmp_path: Path) -> None:
    asked = problem()
    first = asking(served.url, tmp_path / "one", strict=True).plan(asked, SolveOptions(time_limit_s=10))
    verify(asked, first.plan, cost_ns=first.cost_ns, peak_bytes=first.peak_bytes)
    second = asking(served.url, tmp_path / "two", strict=True).plan(asked, SolveOptions(time_limit_s=10))
    assert (second.cache, second.cost_ns, second.plan) == ("hit", first.cost_ns, first.plan)
    assert second.id != first.id


@pytest.mark.slow
def test_killed_while_it_solves_the_job_goes_on(tmp_path: Path, no_solver: None) -> None:
    asked = hard()
    with serving(tmp_path) as served:
        planner = asking(served.url, tmp_path)
        timer = threading.Timer(1.5, served.process.kill)
        timer.start()
        answer = planner.plan(asked, SolveOptions(time_limit_s=6))
        timer.cancel()
    verify(asked, answer.plan)


@pytest.mark.slow
def test_stalled_the_job_goes_on_and_later_asks_it_again(served: Service, tmp_path: Path, no_solver: None) -> None:
    asked = problem(fraction=0.91)  # nobody has asked for it before
    planner = asking(served.url, tmp_path, patience_s=1.0)
    os.kill(served.process.pid, signal.SIGSTOP)
    try:
        answer = planner.plan(asked, SolveOptions(time_limit_s=2.0))
        assert answer.method == "greedy"
        verify(asked, answer.plan)
        with pytest.raises(ServiceError):
            asking(served.url, tmp_path, patience_s=1.0, strict=True).plan(asked, SolveOptions(time_limit_s=1.0))
    finally:
        os.kill(served.process.pid, signal.SIGCONT)
    again = asking(served.url, tmp_path, patience_s=60.0).plan(asked, SolveOptions(time_limit_s=10.0))
    assert again.id is not None
    assert again.method == "auto"


@pytest.mark.slow
def test_a_restart_is_bridged_by_the_retries(tmp_path: Path) -> None:
    asked = problem()
    with serving(tmp_path) as running:
        planner = ServicePlanner(running.url, timeouts=QUICK)
        first = planner.plan(asked, SolveOptions(time_limit_s=10))
        running.stop()
        with pytest.raises(Unreachable):
            service.poll(planner.http, str(first.id))
        running.start()
        found = service.poll(planner.http, str(first.id))
    assert found.plan == first.plan


@pytest.mark.thorough
def test_the_profile_table_is_shared(served: Service, tmp_path: Path) -> None:
    def table(name: str) -> Any:
        planner = asking(served.url, tmp_path / name)
        assert isinstance(planner.asked, FallbackPlanner)
        return planner.profiles

    assert table("a").put("cpu/test", {"k1": Profile(10, 0), "k2": Profile(20, 4)})["k1"] == Profile(10, 0)
    assert table("b").put("cpu/test", {"k1": Profile(99, 9)}) == {"k1": Profile(10, 0)}
    assert table("c").get("cpu/test", ["k1", "k2", "k3"]) == {"k1": Profile(10, 0), "k2": Profile(20, 4)}


@pytest.mark.slow
def test_a_step_starts_on_the_first_plan_of_a_solve_that_goes_on_for_others(served: Service, tmp_path: Path) -> None:
    asked = hard()
    planner, options = asking(served.url, tmp_path).asked, SolveOptions(time_limit_s=120, max_gap=0.0)
    client = ServicePlanner(served.url, timeouts=QUICK)
    other = service.answer_of(client.http.call(**service.submission(asked, options)))
    assert isinstance(planner, FallbackPlanner)
    first = planner.planners[0].first_plan(asked, options)
    verify(asked, first.plan, cost_ns=first.cost_ns)
    assert first.limit == "cancel"
    now = service.poll(client.http, str(other.id))
    assert not now.status.ended
    service.cancel(client.http, str(other.id))


@pytest.mark.slow
def test_progress_cancel_and_attach_on_a_real_solve(served: Service, tmp_path: Path) -> None:
    asked = hard()
    planner = ServicePlanner(served.url, timeouts=QUICK)
    answer = service.answer_of(
        planner.http.call(**service.submission(asked, SolveOptions(time_limit_s=120, max_gap=0.0)))
    )
    assert not answer.status.ended
    seen: list[Progress] = []
    box: list[Answer] = []
    waiting = threading.Thread(target=lambda: box.append(planner.wait(str(answer.id), on_progress=seen.append)))
    waiting.start()
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(progress.cost_ns is not None for progress in seen):
        time.sleep(0.1)
    ran = remat_command("cancel", str(answer.id), "--base-url", served.url, "--json", folder=tmp_path)
    waiting.join(60)
    assert ran.returncode in (0, 4), ran.stderr
    assert json.loads(ran.stdout)["id"] == answer.id
    assert box
    assert box[0].status in (Status.CANCELLED, Status.FEASIBLE, Status.OPTIMAL, Status.NOTHING_FOUND)
    ran = remat_command("ls", "--base-url", served.url, "--json", folder=tmp_path)
    assert answer.id in [row["id"] for row in json.loads(ran.stdout)]


class InProcess(httpx2.AsyncBaseTransport):
    """The application as its test client runs it, in an event loop of its own."""

    def __init__(self, carrier: Any) -> None:
        self._carrier = carrier

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        reply = await asyncio.to_thread(self._carrier.handle_request, request)
        return httpx2.Response(reply.status_code, headers=reply.headers, content=reply.read(), request=request)


@pytest.mark.thorough
def test_the_real_application_can_be_plugged_in_without_a_network(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path / 'store.sqlite'}"))
    asked = problem()
    with TestClient(app, base_url="http://127.0.0.1") as client:
        here = settings(cache_dir=tmp_path, environ={})
        planner = planner_for("http://127.0.0.1", strict=True, given=here, transport=InProcess(client._transport))
        answer = planner.plan(asked, SolveOptions(time_limit_s=10))
        graph: Graph = asked.graph
        tight = Problem(graph, graph.fixed_bytes + 1)
        assert planner.plan(tight, SolveOptions(time_limit_s=10)).status is Status.INFEASIBLE
    verify(asked, answer.plan, cost_ns=answer.cost_ns)
