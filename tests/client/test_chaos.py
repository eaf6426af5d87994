"""The client against a real service that is killed, stalled, restarted, without its database, or without a network."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from benchmarks.graphs.instances import instance
from starlette.testclient import TestClient

from client.liar import Said, in_turn, lying
from client.test_target import remat_command
from remat.errors import ServiceError, Unreachable
from remat.planning import service
from remat.planning.async_client import AsyncRemat
from remat.planning.greedy import greedy_answer
from remat.planning.http import Timeouts
from remat.planning.options import SolveOptions
from remat.planning.planner import CoordinatedPlanner, FallbackPlanner, planner_for
from remat.planning.sources import ServicePlanner
from remat.settings import settings
from remat_ir import Answer, Graph, Problem, Status, budget_at, plain_peak, verify
from remat_service.settings import Settings
from remat_service.web.app import create_app
from service.database import PrivatePostgres
from service.serving import Service, eventually, hard_graph, serving, training_graph

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


AWAY_S = 4.0
"""Longer than the usual retries last, 1.5 s at most."""
ASKED = SolveOptions(time_limit_s=6.0, max_gap=0.0)
WAITING = "waiting for the service"


def lasting(seed: int = 1) -> Problem:
    """One that takes the whole time limit."""
    graph = hard_graph(60, seed)
    return Problem(graph, budget_at(graph, 0.4))


@contextmanager
def away(service: Service, after_s: float, number: int = signal.SIGKILL) -> Iterator[None]:
    """Some seconds into the block, the server is ended by a signal and is away for some more; then it is back."""

    def restart() -> None:
        time.sleep(after_s)
        service.stop(number)
        time.sleep(AWAY_S)
        service.start()

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def by_sdk(url: str, problem: Problem) -> Answer:
    return ServicePlanner(url).plan(problem, ASKED)


def by_event_loop(url: str, problem: Problem) -> Answer:
    async def main() -> Answer:
        async with AsyncRemat(url) as client:
            return await client.solve(problem, time_limit_s=ASKED.time_limit_s, max_gap=ASKED.max_gap)

    return asyncio.run(main())


@pytest.mark.thorough
@pytest.mark.parametrize("ask", [by_sdk, pytest.param(by_event_loop, marks=pytest.mark.slow)])
def test_a_killed_server_is_waited_for_and_its_solve_taken_up(
    ask: Callable[[str, Problem], Answer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One solve, asked for once, and one line that says what is waited for."""
    problem = lasting()
    with caplog.at_level(logging.INFO, "remat"), serving(tmp_path, workers=1) as service:
        with away(service, 2.0):
            answer = ask(service.url, problem)
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        assert [row["id"] for row in service.http.get("/v1/solves").json()["solves"]] == [answer.id]
    said = [record.getMessage() for record in caplog.records]
    assert sum(WAITING in line for line in said) == 1, said
    assert sum("answers again" in line for line in said) == 1, said


@pytest.mark.thorough
def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """Asked before it listens; and one that never comes is given up after the time limit."""
    problem = Problem(training_graph(6), plain_peak(training_graph(6)))
    with serving(tmp_path, workers=1) as service:
        service.stop()
        with pytest.raises(Unreachable):
            ServicePlanner(service.url).plan(problem, SolveOptions(time_limit_s=0.5))
        timer = threading.Timer(AWAY_S, service.start)
        timer.start()
        answer = ServicePlanner(service.url).plan(problem, SolveOptions(time_limit_s=20.0))
        timer.join()
        assert answer.plan is not None


@pytest.mark.slow
def test_the_command_line_has_every_point_of_a_sweep(tmp_path: Path) -> None:
    """The server is killed after the first point, and is back some seconds later."""
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(hard_graph(60, 2).to_json()))
    with serving(tmp_path, workers=1) as service:
        words = ["sweep", str(file), "--budgets", "40%,50%,60%", "-t", "4", "--max-gap", "0"]
        with away(service, 6.0):
            done = remat_command(*words, "--base-url", service.url, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(answer["plan"] for answer in json.loads(done.stdout)["answers"])
    assert done.stderr.count(WAITING) == 1, done.stderr


@pytest.mark.slow
def test_a_stopping_server_is_asked_a_few_times_only(tmp_path: Path) -> None:
    """Polls are held to the end of the notice, and the answer names a time to come back."""
    problem = lasting(3)
    with serving(tmp_path, workers=1, notice_s=3) as service:
        posted = service.post(problem, wait=0, time_limit_s=10, max_gap=0)[1]
        eventually(lambda: service.get(posted["id"], 0)[1]["status"] == "running")
        held: list[Any] = []
        before = len(_log(tmp_path))

        def poll() -> None:
            began = time.monotonic()
            reply = httpx2.get(f"{service.url}/v1/solves/{posted['id']}?wait=25", timeout=60.0, trust_env=False)
            held.append((reply.status_code, reply.headers.get("Retry-After"), time.monotonic() - began))

        polling = threading.Thread(target=poll)
        polling.start()
        with away(service, 1.0, signal.SIGTERM):
            answer = ServicePlanner(service.url).wait(posted["id"], give_up_at=time.monotonic() + 50.0)
        polling.join()
        assert answer.plan is not None
        gets = re.findall(rf'"method": ?"GET", "path": ?"/v1/solves/{posted["id"]}"', _log(tmp_path)[before:])
    (status, come_back, seconds) = held[0]
    assert (status, come_back) == (202, "5")
    assert seconds > 2.0  # of the second before the signal and the three of the notice
    assert 0 < len(gets) < 12, len(gets)


@pytest.mark.thorough
def test_a_stopped_database_is_waited_for(tmp_path: Path) -> None:
    """PostgreSQL is down while the solve runs, and while another is asked for."""
    problem, quick = lasting(4), Problem(training_graph(7), plain_peak(training_graph(7)))
    answers: list[Answer] = []
    with (
        PrivatePostgres() as database,
        serving(
            tmp_path, database_url=database.url, seal_key="a key of forty characters for the seals", workers=1
        ) as service,
    ):
        asking = threading.Thread(target=lambda: answers.append(by_sdk(service.url, problem)))
        asking.start()
        eventually(lambda: service.metric("remat_solves_running") == 1)
        database.stop()
        timer = threading.Timer(2 * AWAY_S, database.start)
        timer.start()
        file = tmp_path / "graph.json"
        file.write_text(json.dumps(quick.graph.to_json()))
        asked = ("solve", str(file), "-b", str(quick.budget_bytes), "-t", "25", "--base-url", service.url, "--json")
        done = remat_command(*asked, folder=tmp_path)
        timer.join()
        asking.join()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WAITING) == 1, done.stderr
    (answer,) = answers
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)


def test_a_poll_that_comes_early_is_repeated_when_the_server_says() -> None:
    """A server that stops says when to come back; one that held the poll as asked is asked again at once."""
    problem = Problem(training_graph(3), plain_peak(training_graph(3)))
    plan = greedy_answer(problem).plan
    answer = Answer.of_plan(problem, plan, method="auto").to_json() | {"id": "a" * 32}
    running = {**answer, "status": "running", "plan": None}
    with lying(in_turn(Said(202, running, {"Retry-After": "2"}), Said(200, answer))) as server:
        began = time.monotonic()
        assert ServicePlanner(server.url).wait("a" * 32, give_up_at=began + 20.0).plan is not None
        waited_s = time.monotonic() - began  # at least: a busy machine waits longer
        assert waited_s >= 2.0
    assert len(server.asked) == 2


def _log(folder: Path) -> str:
    return (folder / "service.log").read_text()
