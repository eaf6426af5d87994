"""Kill anything at any moment: no orphan, no stuck row, no reported incumbent lost, no listener left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from remat_ir import Answer, Problem, Status
from remat_service.notify import Notifier
from remat_service.processes.supervisor import Supervisor
from remat_service.settings import Settings
from remat_service.solving.record import Outcome
from service.serving import (
    Service,
    at_peak,
    checked,
    eventually,
    given_up,
    long_solve,
    open_problem,
    served,
    serving,
    small,
    training_graph,
)

own = served("function", workers=2, cancel_after_s=0.2, terminate_after_s=0.5, kill_after_s=0.5)
"""A service that may be killed."""


def _below(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.process.pid).children(recursive=True)


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.thorough
def test_server_killed(own: Service) -> None:
    """SIGKILL of the server: every process below it ends by itself; started again, it goes on from the incumbent."""
    problem, posted = long_solve(own, 1, 60)
    below = _below(own)
    assert below
    own.stop(signal.SIGKILL)
    eventually(lambda: not _alive(below), 10)
    own.start()
    status, data = own.get(posted["id"], 0)
    assert (status, data["cost_ns"]) == (202, posted["cost_ns"])
    eventually(lambda: own.get(posted["id"], 0)[1]["status"] == "running")
    given_up(own, problem, posted)
    eventually(lambda: len(_below(own)) <= 1)  # the forkserver


def test_solver_child_killed(own: Service) -> None:
    """SIGKILL of the solver child: its engines go with it, another child takes over, the incumbent stays."""
    problem, posted = long_solve(own, 2, 60)
    forkserver = psutil.Process(own.process.pid).children()[0]
    child = forkserver.children()[0]
    family = [child, *child.children(recursive=True)]
    child.kill()
    eventually(lambda: not _alive(family), 10)
    eventually(lambda: [p for p in forkserver.children() if p.pid != child.pid])
    assert own.get(posted["id"], 0)[1]["status"] == "running"
    given_up(own, problem, posted)


@pytest.mark.slow
def test_forkserver_killed(own: Service) -> None:
    """SIGKILL of the forkserver: its children die with it, the next solve has a new one."""
    problem, posted = long_solve(own, 3, 60)
    below = _below(own)
    psutil.Process(own.process.pid).children()[0].kill()
    eventually(lambda: not _alive(below), 10)
    eventually(lambda: own.get(posted["id"], 0)[1]["status"] == "running" and len(_below(own)) >= 2)
    given_up(own, problem, posted)


@pytest.mark.slow
def test_graceful_stop_gives_solves_back(own: Service) -> None:
    """SIGTERM: ends within its bound with nothing left behind; started again, the solve goes on."""
    problem, posted = long_solve(own, 4, 60)
    below = _below(own)
    assert own.stop(signal.SIGTERM) in (0, -signal.SIGTERM)
    assert not _alive(below)
    own.start()
    assert own.get(posted["id"], 0)[1]["cost_ns"] == posted["cost_ns"]
    given_up(own, problem, posted)


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
    problem, posted = long_solve(own, 5, 4)
    forkserver = psutil.Process(own.process.pid).children()[0]
    for process in forkserver.children(recursive=True):
        process.suspend()
    status, data = own.get(posted["id"], 20)
    assert (status, data["status"], data["limit"]) == (200, "feasible", "time")
    assert checked(problem, data).cost_ns <= posted["cost_ns"]
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
        long_solve(own, 7, 60)
        for process in _below(own):
            environment = process.environ()
            assert not [name for name in environment if name.startswith("REMAT_")]
            assert not [value for value in environment.values() if "sqlite" in value]


# ---- the forkserver alone


async def _forkserver() -> psutil.Process:
    (found,) = [p for p in psutil.Process(os.getpid()).children() if "forkserver" in " ".join(p.cmdline())]
    return found


@pytest.mark.thorough
async def test_a_hung_forkserver_is_replaced_and_every_caller_gets_a_child_of_its_own() -> None:
    """Stopped while three wait: each is given a child of the next forkserver, none the child of another."""
    supervisor = Supervisor(Settings(), start_limit_s=2.0)
    try:
        await supervisor.warm()
        hung = await _forkserver()
        hung.send_signal(signal.SIGSTOP)
        children = await asyncio.gather(*(supervisor.start_child(5) for _ in range(3)))
        assert len({child.pid for child in children}) == 3
        assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
        parent = await _forkserver()
        assert {p.pid for p in parent.children()} == {child.pid for child in children}
        for child in children:  # its socket is its own: closing it ends this child and no other
            child.link.close()
            async with asyncio.timeout(10):
                await child.died.wait()
    finally:
        await supervisor.close()


@pytest.mark.thorough
async def test_close_leaves_nobody_waiting() -> None:
    """A caller that waits for a child when the supervisor is closed is refused at once."""
    supervisor = Supervisor(Settings())
    await supervisor.warm()
    (await _forkserver()).send_signal(signal.SIGSTOP)
    asked = [asyncio.create_task(supervisor._ordered(5)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await supervisor.close()
    for task in asked:
        with pytest.raises(OSError, match="died"):
            await task


async def test_a_killed_forkserver_is_replaced(tmp_path: Path) -> None:
    """SIGKILL between two children: the next one comes from a fresh forkserver."""
    supervisor = Supervisor(Settings())
    try:
        first = await supervisor.start_child(5)
        (await _forkserver()).kill()
        async with asyncio.timeout(10):
            await first.died.wait()
        second = await supervisor.start_child(5)
        assert second.pid != first.pid
        assert second.status is None
    finally:
        await supervisor.close()


async def test_listening_leaves_nothing_behind() -> None:
    """Ids that nobody knows, cancelled waits, two listeners on one key: the last to leave takes the key along."""
    notifier = Notifier()
    with notifier.subscribe("a") as first, notifier.subscribe("a", "b") as second:
        first.reset()
        notifier.notify_here("a", "unknown")
        assert await first.wait(0)
        assert await second.wait(0)
        second.reset()
        assert not await second.wait(0)
        notifier.notify("b")
        assert await second.wait(1)
        assert len(notifier.keys()) == 2
    assert len(notifier.keys()) == 0
    task = asyncio.create_task(_listen(notifier))
    await asyncio.sleep(0)
    assert len(notifier.keys()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(notifier.keys()) == 0


async def _listen(notifier: Notifier) -> None:
    with notifier.subscribe("c") as changes:
        await changes.wait(5)


# ---- what a child's end means, however it came to it


def _outcome(**answer: object) -> Outcome:
    net = Problem(training_graph(3), 10_000)
    outcome = Outcome(net, "auto", "d", 0)
    if answer:
        outcome.ended(Answer(method="auto", budget_bytes=10_000, **answer).to_json(), None)
    return outcome


@pytest.mark.parametrize(
    ("cost", "status"), [(5, Status.FEASIBLE), (None, Status.NOTHING_FOUND)], ids=["plan", "no plan"]
)
def test_stopped_at_the_deadline_is_no_cancel(cost: int | None, status: Status) -> None:
    """A child that had to be told that its time was up says `cancel`; the answer says `time`."""
    said = _outcome(status=Status.CANCELLED, limit="cancel", cost_ns=cost)
    late = said.final("deadline", out_of_time=True)
    assert (late.status, late.limit) == (status, "time")
    asked = said.final(None, out_of_time=False)
    assert (asked.status, asked.limit) == (Status.CANCELLED, "cancel")


@pytest.mark.parametrize(
    ("reason", "limit"), [("memory", "memory"), ("killed", "time"), ("terminated", "time"), ("deadline", "time")]
)
def test_killed_without_an_answer(reason: str, limit: str) -> None:
    """What the watchdog did is what stopped it."""
    found = _outcome().final(reason, out_of_time=False)
    assert (found.status, found.limit) == (Status.NOTHING_FOUND, limit)


def test_died_or_failed() -> None:
    """Without a reason from outside, a dead child has failed, and so has one that says so."""
    assert _outcome().final(None, out_of_time=False).status is Status.FAILED
    broken = _outcome()
    broken.failed("failed", "KeyError: 3")
    assert broken.final(None, out_of_time=False).message == "KeyError: 3"


def test_restricted_bounds_stay_inside() -> None:
    """A bound of a restricted search is never taken for one on every plan, and what has no certificate is a claim."""
    inside = _outcome(status=Status.OPTIMAL, cost_ns=9, bound_ns=9, restricted_to=("persistent-schedules",))
    assert inside.claim is None
    total = training_graph(3).total_cost_ns
    outside = _outcome(status=Status.FEASIBLE, cost_ns=total + 9, bound_ns=total + 7)
    assert (outside.claim, outside.proved_ns) == ((total + 7, "auto"), None)
    outside.proved(total + 8)
    outside.claimed(total + 8, "staged")
    assert (outside.claim, outside.proved_ns) == ((total + 7, "auto"), total + 8)
    outside.claimed(total + 9, "staged")
    assert outside.claim == (total + 9, "staged")
