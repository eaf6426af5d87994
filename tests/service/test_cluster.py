"""Servers and workers on PostgreSQL: tickets, takeovers, double deliveries, restarts, fair shares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.postgres import PrivatePostgres
from pydantic import SecretStr
from sqlalchemy import select, text

from remat_ir import Problem, budget_at, plain_peak
from remat_service import cluster
from remat_service.dispatch import next_solve
from remat_service.execute import execute_solve
from remat_service.keys import add_tenant, default_caller
from remat_service.opening import migrate
from remat_service.room import Room, room_of
from remat_service.settings import Settings
from remat_service.tables import plans, solves
from service.database import fresh_database, postgres
from service.serving import Service, checked, eventually, hard_graph, serving, training_graph


class Worker:
    """A running `remat-service worker`."""

    def __init__(self, folder: Path, url: str, **settings: object) -> None:
        environment = {**os.environ, "REMAT_DATABASE_URL": url}
        environment |= {"REMAT_" + name.upper(): str(value) for name, value in settings.items()}
        self._log = (folder / "worker.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "remat_service.cli", "worker", "--workers", "1"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        assert "worker ready" in self.process.stdout.readline()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.process.stdout.close()  # type: ignore[union-attr]
        self._log.close()
        return code


SHORT = {"stale_after_s": 3, "heartbeat_s": 0.5}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """An empty PostgreSQL database."""
    with postgres() as found:
        yield found


def _long(service: Service, seed: int) -> tuple[Problem, dict[str, object]]:
    graph = hard_graph(60, seed)
    problem = Problem(graph, budget_at(graph, 0.4))
    _, greedy = service.post(problem, method="greedy", time_limit_s=20, max_gap=0)
    _, posted = service.post(problem, wait=0, method="staged", time_limit_s=90, max_gap=0, start=greedy["id"])
    eventually(lambda: service.get(posted["id"], 0)[1]["cost_ns"], 40)
    return problem, posted


def test_workers_solve_what_a_server_queues(tmp_path: Path, url: str) -> None:
    """Queued without a worker, solved once there is one; a killed one is replaced, its incumbent kept."""
    with serving(tmp_path, database_url=url, dispatcher="cluster", **SHORT) as server:
        graph = training_graph(6)
        problem = Problem(graph, plain_peak(graph))
        _, posted = server.post(problem, wait=0.5, time_limit_s=5)
        assert posted["status"] == "queued"
        first = Worker(tmp_path, url, **SHORT)
        status, data = server.get(posted["id"], 30)
        assert status == 200
        checked(problem, data)

        problem, long = _long(server, 1)
        cost = server.get(str(long["id"]), 0)[1]["cost_ns"]
        first.stop(signal.SIGKILL)
        second = Worker(tmp_path, url, **SHORT)
        eventually(lambda: "taken" if _attempts(url) >= 2 else None, 30)
        assert server.get(str(long["id"]), 0)[1]["cost_ns"] <= cost
        assert second.stop() == 0  # gives it back
        eventually(lambda: server.get(str(long["id"]), 0)[1]["status"] == "queued")
        data = server.http.post(f"/v1/solves/{long['id']}/cancel").json()
        assert checked(problem, data).cost_ns <= cost


def _attempts(url: str) -> int:
    import psycopg

    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT max(attempt) FROM solves").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.slow
def test_database_restarted(tmp_path: Path) -> None:
    """PostgreSQL stopped at once and started again, twice, under load: no request lost, none wrong."""
    with (
        PrivatePostgres() as private,
        fresh_database(private.url) as url,
        serving(tmp_path, database_url=url, dispatcher="cluster", **SHORT) as server,
    ):
        worker = Worker(tmp_path, url, **SHORT)
        _, long = _long(server, 2)
        graphs = [training_graph(5 + i, cost=100 + i) for i in range(12)]
        ids = []
        for i, graph in enumerate(graphs):
            if i in (4, 8):
                private.stop()
                assert server.http.get("/readyz").status_code == 503
                time.sleep(1)
                private.start()
                eventually(lambda: server.http.get("/readyz").status_code == 200, 30)
            status, data = server.post(Problem(graph, plain_peak(graph)), wait=0, time_limit_s=5)
            assert status in (200, 202), data
            ids.append(data["id"])
        server.http.post(f"/v1/solves/{long['id']}/cancel")
        for solve_id, graph in zip(ids, graphs, strict=True):
            found = eventually(lambda solve_id=solve_id: (got := server.get(solve_id, 5))[0] == 200 and got, 60)
            checked(Problem(graph, plain_peak(graph)), found[1])
        worker.stop()


async def _room(url: str) -> Room:
    room = room_of(Settings(database_url=SecretStr(url), dispatcher="cluster", stale_after_s=3))
    await migrate(room.database)
    return room


async def _queued(room: Room, tenant: str, count: int, seed: int = 0) -> list[str]:
    """Solves of a tenant written as a server writes them."""
    from remat_service import desk
    from remat_service.asks import Ask
    from remat_service.claim import caller_of

    room.enqueue = cluster.enqueue
    async with room.database.write() as connection:
        if tenant == "default":
            caller = await default_caller(connection)
        else:
            caller = await caller_of(connection, await add_tenant(connection, tenant))
    ids = []
    for i in range(count):
        graph = training_graph(5, cost=1000 * (seed + 1) + i)
        ask = Ask(Problem(graph, plain_peak(graph)), time_limit_s=5, method="checkpoint-all")
        request_id = await desk.admit(room, caller, ask)
        ids.append((await desk.view(room, caller, request_id)).solve_id)
    return ids


async def test_delivered_twice_writes_once(tmp_path: Path, url: str) -> None:
    """Two executions of one solve at once: one claims it, one plan is stored."""
    import asyncio

    room = await _room(url)
    try:
        (solve_id,) = await _queued(room, "default", 1)
        done = await asyncio.gather(execute_solve(room, solve_id), execute_solve(room, solve_id))
        assert sorted(done) == [False, True]
        assert await execute_solve(room, solve_id) is False
        async with room.database.read() as connection:
            assert len((await connection.execute(select(plans.c.id))).all()) == 1
            assert (await connection.execute(select(solves.c.attempt, solves.c.state))).one() == (1, "ended")
    finally:
        await room.warden.close()
        await room.database.close()


async def test_who_lost_the_claim_writes_nothing(url: str) -> None:
    """A worker that was thought dead comes back: its writes are refused by the fencing token."""
    from remat_service.claim import LostClaim, claim_solve
    from remat_service.ledger import Ledger

    room = await _room(url)
    try:
        (solve_id,) = await _queued(room, "default", 1)
        old = await claim_solve(room, solve_id)
        assert old is not None
        async with room.database.write() as connection:
            await connection.execute(text("UPDATE solves SET heartbeat_at = now() - interval '1 hour'"))
        new = await claim_solve(room, solve_id)
        assert new is not None
        assert new.attempt == old.attempt + 1
        with pytest.raises(LostClaim):
            async with room.database.write() as connection:
                await Ledger(room, old).write(connection, {"cost_ns": 1})
        async with room.database.read() as connection:
            assert await connection.scalar(select(solves.c.cost_ns)) is None
    finally:
        await room.database.close()


async def test_tickets_come_with_their_solves_and_are_reconciled(url: str) -> None:
    """Enqueued in the same transaction, rolled back with it; lost tickets are added, dead ones dropped."""
    room = await _room(url)
    count = text("SELECT count(*) FROM procrastinate_jobs WHERE status = 'todo'")
    try:
        await _queued(room, "default", 3)
        async with room.database.read() as connection:
            assert await connection.scalar(count) == 3
        with pytest.raises(RuntimeError):
            await _enqueue_and_fail(room)
        async with room.database.write() as connection:
            assert await connection.scalar(count) == 3
            await connection.execute(text("DELETE FROM procrastinate_jobs WHERE id = 1"))
            await connection.execute(text("UPDATE procrastinate_jobs SET status = 'doing' WHERE id = 2"))
        found = await cluster.reconcile(room)
        assert (found["dropped"], found["added"]) == (1, 2)
        assert await cluster.reconcile(room) == {"requeued": 0, "dropped": 0, "added": 0}
    finally:
        await room.database.close()


async def _enqueue_and_fail(room: Room) -> None:
    async with room.database.write() as connection:
        await cluster.enqueue(connection, "x" * 32, 0)
        raise RuntimeError


async def test_tenants_take_turns(url: str) -> None:
    """With one tenant's solve running, the other's is next, though it came later; a full tenant waits."""
    room = await _room(url)
    try:
        first = await _queued(room, "default", 3)
        second = await _queued(room, "others", 2, seed=1)
        assert await next_solve(room) == first[0]
        async with room.database.write() as connection:
            await connection.execute(
                text("UPDATE solves SET state = 'running', heartbeat_at = now() WHERE id = :id"), {"id": first[0]}
            )
        assert await next_solve(room) == second[0]
        async with room.database.write() as connection:
            await connection.execute(text("UPDATE tenants SET most_running = 0 WHERE name = 'others'"))
        assert await next_solve(room) == first[1]
    finally:
        await room.database.close()
