"""Servers and workers of the version before, next to those of this one, on one database."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from remat_ir import Problem
from service.before import program_before
from service.database import postgres
from service.serving import Machines, Service, all_answered, checked, eventually, long_solve, small


@pytest.fixture
def url() -> Iterator[str]:
    """An empty PostgreSQL database."""
    with postgres() as found:
        yield found


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The version before."""
    return program_before(tmp_path / "before")


def _rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


def _load(servers: list[Service], first: int, count: int) -> dict[str, Problem]:
    """Problems, each POSTed to every server in turn, all at once."""
    with ThreadPoolExecutor(8) as pool:
        asked = [
            (pool.submit(server.post, small(i), 0.0, time_limit_s=5, method="checkpoint-all"), small(i))
            for i in range(first, first + count)
            for server in servers
        ]
        return {found.result()[1]["id"]: problem for found, problem in asked}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_version_after_the_other(machines: Machines, program: Path, url: str) -> None:
    """Forwards and back again under load, process by process: everything is answered, and solved at most twice.

    What is of the version before was started before the schema changed.
    """
    old = machines.server(program)
    old_worker = machines.worker(program=program, dispatcher="cluster")
    posted = _load([old], 0, 6)
    new = machines.server()
    posted |= _load([old, new], 6, 6)
    new_worker = machines.worker()
    posted |= _load([new, old], 12, 6)
    all_answered(new, posted, 300)
    assert new_worker.stop() == 0
    posted = _load([new, old], 18, 6)
    all_answered(new, posted, 300)  # read by the new server, solved by the old worker
    machines.worker()
    assert old_worker.stop() == 0
    posted = _load([old, new], 24, 6)
    new.stop()
    all_answered(old, posted, 300)  # and the other way round
    assert {row[0] for row in _rows(url, "SELECT state FROM solves")} == {"ended"}
    assert max(int(str(row[0])) for row in _rows(url, "SELECT count(*) FROM solves GROUP BY flight_key")) <= 2
    assert max(int(str(row[0])) for row in _rows(url, "SELECT attempt FROM solves")) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_version_takes_over_from_the_other(machines: Machines, program: Path, url: str) -> None:
    """A worker of the version before leaves a living one of this version alone, and each takes a dead one's solve."""
    old_worker = machines.worker(program=program, dispatcher="cluster")
    new, worker = machines.server(), machines.worker()
    asked = {posted["id"]: problem for problem, posted in (long_solve(new, seed, 600) for seed in (1, 2))}
    by_worker = "SELECT r.id FROM requests r JOIN solves s ON s.id = r.solve_id WHERE s.state = 'running' AND s.worker"
    mine = str(_rows(url, f"{by_worker} LIKE '%:{worker.process.pid}'")[0][0])
    (other,) = asked.keys() - {mine}

    def attempt() -> object:
        query = f"SELECT s.attempt FROM solves s JOIN requests r ON s.id = r.solve_id WHERE r.id = '{mine}'"
        return _rows(url, query)[0][0]

    time.sleep(8.0)  # two rounds of the upkeep of the version before, which looks at the engine's jobs
    assert [new.get(each, 0)[1]["status"] for each in asked] == ["running"] * 2
    assert attempt() == 1
    worker.stop(signal.SIGKILL)
    new.http.post(f"/v1/solves/{other}/cancel")  # the one slot of the old worker is free
    eventually(lambda: attempt() == 2, 30)
    machines.worker()
    old_worker.stop(signal.SIGKILL)
    eventually(lambda: attempt() == 3, 30)
    checked(asked[mine], new.http.post(f"/v1/solves/{mine}/cancel").json())
