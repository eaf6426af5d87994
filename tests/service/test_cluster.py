"""Servers and workers on PostgreSQL, as processes: killed, stopped and continued, restarted, of two versions."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from remat_ir import Problem, budget_at, plain_peak
from remat_service.context import Context
from remat_service.requests.parse import Ask
from remat_service.requests.submit import Submission
from remat_service.solving.cluster import Fleet
from service.database import PrivatePostgres, default_tenant, fresh_database, postgres, process
from service.serving import (
    SHORT,
    Machines,
    Service,
    Worker,
    all_answered,
    at_peak,
    checked,
    eventually,
    given_up,
    hard_graph,
    long_solve,
    open_problem,
    serving,
    small,
    training_graph,
)
from service.test_tenants import Tenant, cli

_TAKEN_OVER_S = 3 + 2 * 3.0  # the lease, and two rounds of upkeep on a busy machine


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """An empty PostgreSQL database."""
    with postgres() as found:
        yield found


@pytest.fixture
def server(tmp_path: Path, url: str) -> Iterator[Service]:
    """A server that solves nothing by itself."""
    with serving(tmp_path, database_url=url, dispatcher="cluster", **SHORT) as found:
        yield found


def _ask(url: str, query: str, *values: object) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(query, values)
        return found.fetchall() if found.description else []


def _solves(url: str, what: str = "state") -> list[Any]:
    return [row[0] for row in _ask(url, f"SELECT {what} FROM solves ORDER BY queued_at, id")]


@pytest.mark.slow
def test_a_worker_that_was_stopped_ends_nobody_elses_solve(server: Service, machines: Machines, url: str) -> None:
    """A is stopped, B takes its solve over, A goes on and writes nothing; B is killed, and C ends the solve."""
    first = machines.worker()
    problem, posted = long_solve(server, 1)
    first.process.send_signal(signal.SIGSTOP)
    second = machines.worker()
    eventually(lambda: _solves(url, "attempt") and max(_solves(url, "attempt")) == 2, _TAKEN_OVER_S)
    first.process.send_signal(signal.SIGCONT)
    time.sleep(3.0)
    assert server.get(posted["id"], 0)[1]["status"] == "running"
    assert max(_solves(url, "attempt")) == 2  # A has ended its job, and B's solve goes on
    first.stop(signal.SIGKILL)
    second.stop(signal.SIGKILL)
    machines.worker()
    eventually(lambda: max(_solves(url, "attempt")) == 3, _TAKEN_OVER_S)
    given_up(server, problem, posted)


@pytest.mark.thorough
def test_a_dead_workers_solve_goes_on_soon(server: Service, machines: Machines, url: str) -> None:
    """Killed while it solves, its only other worker busy to the last slot: waiting again within seconds of its lease,
    its incumbent there, and solved as soon as there is a slot.
    """
    dead = machines.worker()
    problem, posted = long_solve(server, 1)
    _, other = server.post(open_problem(2), wait=0, method="staged", time_limit_s=90, max_gap=0)
    machines.worker()
    eventually(lambda: _solves(url).count("running") == 2)
    dead.stop(signal.SIGKILL)
    begun = time.monotonic()
    eventually(lambda: _solves(url).count("queued") == 1, _TAKEN_OVER_S)
    print(f"taken over {time.monotonic() - begun - SHORT['stale_after_s']:.1f} s after its lease had run out")
    assert server.get(posted["id"], 0)[1]["cost_ns"] <= posted["cost_ns"]
    server.http.post(f"/v1/solves/{other['id']}/cancel")
    eventually(lambda: server.get(posted["id"], 0)[1]["status"] == "running", 15)
    given_up(server, problem, posted)


@pytest.mark.slow
def test_a_worker_stops_and_gives_its_solve_back(server: Service, machines: Machines) -> None:
    """On SIGTERM its solve waits again at once."""
    worker = machines.worker()
    problem, posted = long_solve(server, 1)
    assert worker.stop() == 0
    assert server.get(posted["id"], 0)[1]["status"] == "queued"
    given_up(server, problem, posted)


@asynccontextmanager
async def _in_cluster(url: str) -> AsyncIterator[Context]:
    """A process whose misses are carried to workers."""
    async with process(url, dispatcher="cluster", **SHORT) as context:
        context.queue.carry = Fleet(context).carry
        yield context


async def _held_open(url: str, seconds: float, problem: Problem) -> str:
    """A miss whose transaction is open for so long after its row is there; the request's id."""
    async with _in_cluster(url) as context:
        put = context.queue.put

        async def slow(connection: Any, values: Any) -> str | None:
            found = await put(connection, values)
            await asyncio.sleep(seconds)
            return found

        context.queue.put = slow
        caller = await default_tenant(context)
        return await Submission(context, caller, Ask(problem, time_limit_s=5, method="checkpoint-all")).submit()


@pytest.mark.thorough
def test_a_job_that_comes_before_its_miss_loses_nothing(server: Service, machines: Machines, url: str) -> None:
    """A worker runs a job that finds nothing, while the miss is not committed; the miss is solved all the same."""
    machines.worker()
    posted = {server.post(small(0))[1]["id"]: small(0)}
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: asyncio.run(_held_open(url, 4.0, small(1))))
        time.sleep(2.0)
        jobs = "SELECT count(*) FROM procrastinate_jobs"
        _ask(url, "INSERT INTO procrastinate_jobs (queue_name, task_name) VALUES ('remat', 'remat.execute')")
        eventually(lambda: _ask(url, jobs)[0][0] == 0, 10)  # run, to no end
        assert not late.done()
        posted[late.result(30)] = small(1)
    all_answered(server, posted)


@pytest.mark.thorough
def test_lost_jobs_are_missed(server: Service, machines: Machines, url: str) -> None:
    """Every job is gone, and nobody tells: what waits is solved."""
    posted = {server.post(small(i), wait=0)[1]["id"]: small(i) for i in range(4)}
    _ask(url, "DELETE FROM procrastinate_jobs")
    machines.worker()
    all_answered(server, posted)


@pytest.mark.slow
def test_killed_at_any_moment(server: Service, machines: Machines, url: str) -> None:
    """Workers and the server, killed at moments all over a solve's life: every request is answered, and rightly."""
    posted: dict[str, Problem] = {}

    def post(i: int) -> None:
        for _ in range(100):
            try:
                reply = server.http.post(
                    "/v1/solves",
                    json={"problem": small(i).to_json(), "time_limit_s": 5, "method": "checkpoint-all"},
                    headers={"Idempotency-Key": f"key-{i}"},
                )
                posted[reply.json()["id"]] = small(i)
                return
            except Exception:
                time.sleep(0.3)

    worker = machines.worker()
    for i in range(8):
        asking = threading.Thread(target=post, args=(i,))
        asking.start()
        time.sleep(0.03 + 0.11 * i)
        if i % 2:
            server.stop(signal.SIGKILL)
            server.start()
        else:
            worker.stop(signal.SIGKILL)
            worker = machines.worker()
        asking.join(60)
    assert len(posted) == 8
    all_answered(server, posted, 90)
    assert len(_solves(url)) == 8
    assert set(_solves(url)) == {"ended"}


_DIES_AFTER_ITS_ANSWER = """
import os, signal, sys
from remat_service.solving import run
write = run.write_answers
settle = run.SolveRun._settle
async def settled(self, *arguments):
    await settle(self, *arguments)
    os.kill(os.getpid(), signal.SIGKILL)
run.SolveRun._settle = settled
from remat_service.cli import main
sys.argv = ["remat-service", "worker", "--workers", "1"]
main()
"""


@pytest.mark.thorough
def test_killed_right_after_an_answer_is_written(
    server: Service, machines: Machines, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is there, nothing is solved again, and the engine's job that was left behind is removed."""
    for name, value in {"database_url": url, **SHORT}.items():
        monkeypatch.setenv("REMAT_" + name.upper(), str(value))
    with (tmp_path / "dies.log").open("w") as log:
        dying = subprocess.Popen([sys.executable, "-c", _DIES_AFTER_ITS_ANSWER], stdout=log, stderr=log)
    _, posted = server.post(small(0), wait=0, time_limit_s=5)
    assert dying.wait(60) == -signal.SIGKILL, (tmp_path / "dies.log").read_text()[-3000:]
    assert _solves(url) == ["ended"]
    status, data = server.get(posted["id"], 10)
    assert status == 200
    checked(small(0), data)
    time.sleep(SHORT["stale_after_s"] + 0.5)
    machines.worker()
    eventually(lambda: _ask(url, "SELECT count(*) FROM procrastinate_jobs")[0][0] == 0, 15)
    assert _solves(url, "attempt") == [1]


@pytest.mark.thorough
def test_a_joiner_makes_a_solve_of_its_tenant_urgent(server: Service, machines: Machines, url: str) -> None:
    """Of three that wait, the last one is joined with a higher priority: it is the first to run."""
    ids = [server.post(small(i), wait=0, time_limit_s=5)[1]["id"] for i in range(3)]
    server.post(small(2), wait=0, time_limit_s=5, priority=10)
    machines.worker()
    all_answered(server, {request_id: small(i) for i, request_id in enumerate(ids)})
    started = _solves(url, "started_at")
    assert started[2] < started[0] < started[1]


@pytest.mark.thorough
def test_a_tenant_at_its_limit_is_served_one_after_the_other(server: Service, machines: Machines, url: str) -> None:
    """Three workers, one running solve allowed: never two at once, and all end without waiting for upkeep."""
    _ask(url, "UPDATE tenants SET most_running = 1")
    for _ in range(3):
        machines.worker()
    ids = [server.post(small(i), wait=0, time_limit_s=5)[1]["id"] for i in range(8)]
    all_answered(server, {request_id: small(i) for i, request_id in enumerate(ids)})
    spans = _ask(url, "SELECT started_at, ended_at FROM solves ORDER BY started_at")
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.slow
def test_sweeps_and_single_solves_at_once(server: Service, machines: Machines, url: str) -> None:
    """Batches of misses and single ones from many connections: no deadlock, every one solved once."""
    machines.worker("--workers", "2")
    graphs = [training_graph(5, cost=5000 + 10 * i) for i in range(4)]

    def sweep(i: int) -> str:
        budgets = [plain_peak(graphs[i]) + j for j in range(6)]
        body = {"graph": graphs[i].to_json(), "budgets_bytes": budgets, "time_limit_s": 5, "method": "checkpoint-all"}
        return str(server.http.post("/v1/sweeps", json=body).json()["id"])

    with ThreadPoolExecutor(8) as pool:
        sweeps = [pool.submit(sweep, i) for i in range(4)]
        singles = [pool.submit(server.post, small(i), 0.0, time_limit_s=5) for i in range(12)]
        posted = {single.result()[1]["id"]: small(i) for i, single in enumerate(singles)}
        ids = [found.result() for found in sweeps]
    all_answered(server, posted)
    for sweep_id in ids:
        eventually(lambda sweep_id=sweep_id: server.http.get(f"/v1/sweeps/{sweep_id}?wait=5").json()["ended"], 60)
    assert len(_solves(url)) == len(set(_solves(url, "flight_key")))
    assert "deadlock" not in (server.folder / "service.log").read_text()


@pytest.mark.thorough
def test_a_server_that_solves_takes_part(tmp_path: Path, url: str, machines: Machines) -> None:
    """A server with REMAT_DISPATCHER=embedded next to workers: one queue, so nothing is started twice."""
    machines.worker()
    with serving(tmp_path, database_url=url, workers=1, **SHORT) as server:
        ids = [server.post(small(i), wait=0, time_limit_s=5)[1]["id"] for i in range(10)]
        all_answered(server, {request_id: small(i) for i, request_id in enumerate(ids)})
    assert set(_solves(url, "attempt")) == {1}


@pytest.mark.thorough
def test_disowning_reaches_every_server(tmp_path: Path, url: str, machines: Machines) -> None:
    """An answer that two servers hold in memory is found by neither, two seconds after its epoch is over."""
    problem = at_peak(training_graph(6))
    with (
        serving(tmp_path / "first", database_url=url, dispatcher="cluster") as one,
        serving(tmp_path / "second", database_url=url, dispatcher="cluster") as two,
    ):
        machines.worker()
        _, data = one.post(problem)
        for _ in range(2):
            assert [server.get(data["id"], 20)[0] for server in (one, two)] == [200, 200]
        cli(one, "tenants", "disown", "default")
        time.sleep(2.2)
        assert [server.get(data["id"], 0)[0] for server in (one, two)] == [404, 404]
        status, anew = two.post(problem)
        assert (status, anew["cache"]) == (200, "miss")
        assert one.get(anew["id"], 0)[0] == 200


@pytest.mark.thorough
def test_lines_of_a_workers_log_say_whose_they_are(tmp_path: Path, url: str, machines: Machines) -> None:
    """Tenant, key and request of who queued the solve, from its claim to its end or its way back into the queue."""
    with serving(tmp_path, database_url=url, dispatcher="cluster", require_keys="true", **SHORT) as server:
        team = Tenant(server, cli(server, "keys", "create", "logged", "--new-tenant"))
        (key,) = [line.split()[0] for line in cli(server, "keys", "list").splitlines()]
        worker = machines.worker(drain_s=1)
        for name, graph, wait in (("short", training_graph(5), 20), ("long", hard_graph(60, 3), 0)):
            body = {"problem": Problem(graph, budget_at(graph, 0.4)).to_json(), "method": "staged", "max_gap": 0}
            headers = {"X-Request-ID": name, "Prefer": f"wait={wait}"}
            assert team.http.post("/v1/solves", json=body | {"time_limit_s": 600}, headers=headers).is_success
        eventually(lambda: "running" in _solves(url))
        assert worker.stop() == 0
    said = map(json.loads, (tmp_path / "worker-0" / "worker.log").read_text().splitlines())
    lines = [line for line in said if "solve" in line]
    assert {(line["tenant"], line["key"]) for line in lines} == {("logged", key)}
    assert {(line["request"], line["event"]) for line in lines} == {
        ("short", "solve started"), ("short", "solve ended"),
        ("long", "solve started"), ("long", "solve given back to the queue"),
    }  # fmt: skip


@pytest.mark.slow
def test_an_outage_is_told_and_is_two_lines_a_loop(tmp_path: Path) -> None:
    """The database away for some rounds of every loop: server and worker tell probes and callers, and go on by
    themselves. Neither logs a traceback, or a line twice; SIGTERM ends the worker within its limit.
    """
    problem, away = at_peak(training_graph(6)), "the database does not answer"
    with PrivatePostgres() as private, fresh_database(private.url) as url:
        with serving(tmp_path / "server", database_url=url, dispatcher="cluster", **SHORT) as server:
            port = server.port + 1
            worker = Worker(tmp_path / "worker", url, "--metrics-port", str(port), drain_s=2, **SHORT)
            answer = server.post(small(0), time_limit_s=5)[1]
            probe = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False)
            shown = ("remat_solve_seconds_count", "remat_queue_wait_seconds_count 1.0")
            eventually(lambda: all(name in probe.get("/metrics").text for name in shown))
            assert (probe.get("/readyz").status_code, probe.get("/readyz").text) == (200, "ready")
            private.stop()
            eventually(lambda: away in server.http.get("/readyz").text, 10)
            eventually(lambda: probe.get("/readyz").text == away, 20)
            assert [each.get("/readyz").status_code for each in (server.http, probe)] == [503, 503]
            assert probe.get("/metrics").status_code == 200
            reply = server.http.get(f"/v1/solves/{answer['id']}")
            assert (reply.status_code, reply.json()["detail"]) == (503, away)
            assert int(reply.headers["Retry-After"]) > 0
            time.sleep(16)
            private.start()
            for each in (server.http, probe):
                eventually(lambda each=each: each.get("/readyz").status_code == 200, 30)
            assert server.get(answer["id"], 0) == (200, answer)
            checked(problem, server.post(problem, time_limit_s=5)[1])
            assert worker.stop() == 0
        for log in (tmp_path / "server" / "service.log", tmp_path / "worker" / "worker.log"):
            text = log.read_text()
            assert "Traceback" not in text, text[:5000]
            said = [line["event"] for line in map(json.loads, text.splitlines()) if "database" in line["event"]]
            assert any("does not answer" in event for event in said)
            assert len(said) == len(set(said)), said


@pytest.mark.thorough
async def test_one_process_at_a_time_defers_what_is_missing(url: str) -> None:
    """With a hundred workers, ninety-nine find that somebody is at it, and go on."""
    async with _in_cluster(url) as context:
        caller = await default_tenant(context)
        await Submission(context, caller, Ask(small(0), time_limit_s=5)).submit()
        _ask(url, "DELETE FROM procrastinate_jobs")
        with psycopg.connect(url) as other:
            other.execute("SELECT pg_advisory_xact_lock(1919246704)")
            assert await Fleet(context).once() == (0, 0)
        assert await Fleet(context).once() == (0, 1)
        assert await Fleet(context).once() == (0, 0)
