"""Kill anything at any moment: no orphan, no stuck row, no reported incumbent lost."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from remat_ir import Problem
from service.serving import (
    Service,
    at_peak,
    checked,
    eventually,
    long_solve,
    open_problem,
    served,
    serving,
    small,
    training_graph,
)

own = served("function", workers=2, cancel_after_s=0.2, terminate_after_s=0.5, kill_after_s=0.5)
"""A service that may be killed."""


def _begin(service: Service, seed: int, time_limit_s: float = 60) -> tuple[Problem, dict[str, object], int]:
    """A long solve with an incumbent already reported: (problem, answer so far, its cost)."""
    problem, posted = long_solve(service, seed, time_limit_s)
    return problem, posted, posted["cost_ns"]


def _below(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.process.pid).children(recursive=True)


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _ends_with(service: Service, problem: Problem, posted: dict[str, object], cost: int) -> None:
    data = service.http.post(f"/v1/solves/{posted['id']}/cancel").json()
    assert checked(problem, data).cost_ns <= cost


@pytest.mark.thorough
def test_server_killed(own: Service) -> None:
    """SIGKILL of the server: every process below it ends by itself; started again, it goes on from the incumbent."""
    problem, posted, cost = _begin(own, 1)
    below = _below(own)
    assert below
    own.stop(signal.SIGKILL)
    eventually(lambda: not _alive(below), 10)
    own.start()
    status, data = own.get(str(posted["id"]), 0)
    assert (status, data["cost_ns"]) == (202, cost)
    eventually(lambda: own.get(str(posted["id"]), 0)[1]["status"] == "running")
    _ends_with(own, problem, posted, cost)
    eventually(lambda: len(_below(own)) <= 1)  # the forkserver


def test_solver_child_killed(own: Service) -> None:
    """SIGKILL of the solver child: its engines go with it, another child takes over, the incumbent stays."""
    problem, posted, cost = _begin(own, 2)
    forkserver = psutil.Process(own.process.pid).children()[0]
    child = forkserver.children()[0]
    family = [child, *child.children(recursive=True)]
    child.kill()
    eventually(lambda: not _alive(family), 10)
    eventually(lambda: [p for p in forkserver.children() if p.pid != child.pid])
    assert own.get(str(posted["id"]), 0)[1]["status"] == "running"
    _ends_with(own, problem, posted, cost)


@pytest.mark.slow
def test_forkserver_killed(own: Service) -> None:
    """SIGKILL of the forkserver: its children die with it, the next solve has a new one."""
    problem, posted, cost = _begin(own, 3)
    below = _below(own)
    psutil.Process(own.process.pid).children()[0].kill()
    eventually(lambda: not _alive(below), 10)
    eventually(lambda: own.get(str(posted["id"]), 0)[1]["status"] == "running" and len(_below(own)) >= 2)
    _ends_with(own, problem, posted, cost)


@pytest.mark.slow
def test_graceful_stop_gives_solves_back(own: Service) -> None:
    """SIGTERM: ends within its bound with nothing left behind; started again, the solve goes on."""
    problem, posted, cost = _begin(own, 4)
    below = _below(own)
    assert own.stop(signal.SIGTERM) in (0, -signal.SIGTERM)
    assert not _alive(below)
    own.start()
    assert own.get(str(posted["id"]), 0)[1]["cost_ns"] == cost
    _ends_with(own, problem, posted, cost)


@pytest.mark.thorough
def test_not_ready_before_it_stops(tmp_path: Path) -> None:
    """After SIGTERM: not ready, and no new solve, but what is stored is still answered; then the end."""
    with serving(tmp_path, workers=1, notice_s=6, drain_s=2) as own:
        # of other graphs: one with other costs alone is answered from what is stored
        stored, other = small(0), at_peak(training_graph(6))
        assert own.post(stored, time_limit_s=5)[0] == 200
        own.process.send_signal(signal.SIGTERM)
        eventually(lambda: own.http.get("/readyz").status_code == 503, 5)
        assert own.post(stored, time_limit_s=5)[1]["cache"] == "hit"
        assert own.post(other, time_limit_s=5)[0] == 503
        assert own.http.get("/livez").status_code == 200
        assert own.stop() in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_a_solver_that_does_not_stop_is_killed(own: Service) -> None:
    """A child that is frozen at its deadline can't answer: its group is killed, the incumbent is the answer."""
    problem, posted, cost = _begin(own, 5, time_limit_s=4)
    forkserver = psutil.Process(own.process.pid).children()[0]
    for process in forkserver.children(recursive=True):
        process.suspend()
    status, data = own.get(str(posted["id"]), 20)
    assert (status, data["status"], data["limit"]) == (200, "feasible", "time")
    assert checked(problem, data).cost_ns <= cost
    assert own.metric("remat_solver_kills_total") >= 1
    eventually(lambda: not forkserver.children())


@pytest.mark.thorough
def test_memory_watchdog(tmp_path: Path) -> None:
    """Over its memory a solve's group is killed at once; the answer says so."""
    with serving(tmp_path, workers=1, solver_memory_bytes=2**26) as own:
        status, data = own.post(open_problem(6), method="staged", time_limit_s=20, max_gap=0)
        assert (status, data["limit"]) == (200, "memory")
        assert own.metric("remat_solver_kills_total") == 1


@pytest.mark.thorough
def test_children_hold_no_secret(tmp_path: Path) -> None:
    """The environment of forkserver and children is scrubbed."""
    with serving(tmp_path, workers=1) as own:
        _begin(own, 7)
        for process in _below(own):
            environment = process.environ()
            assert not [name for name in environment if name.startswith("REMAT_")]
            assert not [value for value in environment.values() if "sqlite" in value]
