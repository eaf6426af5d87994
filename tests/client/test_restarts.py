"""A service that is killed, stopped or without its database for seconds: its clients wait, and have their answers."""

from __future__ import annotations

import asyncio
import json
import logging
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

from client.liar import Said, in_turn, lying
from client.test_target import remat_command
from remat.errors import Unreachable
from remat.planning.async_client import AsyncRemat
from remat.planning.greedy import greedy_answer
from remat.planning.options import SolveOptions
from remat.planning.sources import ServicePlanner
from remat_ir import Answer, Problem, budget_at, plain_peak, verify
from service.database import PrivatePostgres
from service.serving import Service, eventually, hard_graph, serving, training_graph

AWAY_S = 4.0
"""Longer than the usual retries last, 1.5 s at most."""
ASKED = SolveOptions(time_limit_s=6.0, max_gap=0.0)
WAITING = "waiting for the service"


def hard(seed: int = 1) -> Problem:
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
    problem = hard()
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
    problem = hard(3)
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
    problem, quick = hard(4), Problem(training_graph(7), plain_peak(training_graph(7)))
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
