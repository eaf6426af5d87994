"""Servers and workers on PostgreSQL: tickets, takeovers, double deliveries, restarts, fair shares."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import select, text, update
from typer.testing import CliRunner

from remat_ir import Problem, plain_peak
from remat_service.cli import app
from remat_service.context import Context, build_context
from remat_service.errors import RateLimited
from remat_service.settings import Settings
from remat_service.solving.claim import claim_solve
from remat_service.solving.cluster import Queue
from remat_service.solving.dispatch import next_solve
from remat_service.storage.prepare import migrate
from remat_service.storage.tables import events, solves
from remat_service.tenants.keys import add_tenant, default_caller
from service.database import PrivatePostgres, fresh_database, postgres
from service.serving import Worker, checked, eventually, long_solve, serving, training_graph

SHORT = {"stale_after_s": 3, "heartbeat_s": 0.5}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """An empty PostgreSQL database."""
    with postgres() as found:
        yield found


@pytest.mark.slow
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

        problem, long = long_solve(server, 1)
        cost = server.get(str(long["id"]), 0)[1]["cost_ns"]
        first.stop(signal.SIGKILL)
        second = Worker(tmp_path, url, **SHORT)
        eventually(lambda: "taken" if _attempts(url) >= 2 else None, 30)
        assert server.get(str(long["id"]), 0)[1]["cost_ns"] <= cost
        assert second.stop() == 0  # gives it back
        eventually(lambda: server.get(str(long["id"]), 0)[1]["status"] == "queued")
        data = server.http.post(f"/v1/solves/{long['id']}/cancel").json()
        assert checked(problem, data).cost_ns <= cost


def test_disowning_reaches_every_server(tmp_path: Path, url: str) -> None:
    """An answer that two servers hold in memory is found by neither, two seconds after its epoch is over."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    graph = training_graph(6)
    with (
        serving(first, database_url=url, dispatcher="cluster") as one,
        serving(second, database_url=url, dispatcher="cluster") as two,
    ):
        worker = Worker(tmp_path, url, **SHORT)
        _, data = one.post(Problem(graph, plain_peak(graph)))
        for _ in range(2):
            assert [server.get(data["id"], 20)[0] for server in (one, two)] == [200, 200]
        done = CliRunner().invoke(app, ["tenants", "disown", "default"], env={"REMAT_DATABASE_URL": url})
        assert done.exit_code == 0, done.output
        time.sleep(2.2)
        assert [server.get(data["id"], 0)[0] for server in (one, two)] == [404, 404]
        status, anew = two.post(Problem(graph, plain_peak(graph)))
        assert (status, anew["cache"]) == (200, "miss")
        assert one.get(anew["id"], 0)[0] == 200
        assert worker.stop() == 0


def _attempts(url: str) -> int:
    import psycopg

    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT max(attempt) FROM solves").fetchone()
    assert row is not None
    return int(row[0])


async def _context(url: str) -> Context:
    context = build_context(Settings(database_url=SecretStr(url), dispatcher="cluster", **SHORT))
    await migrate(context.database)
    return context


async def _queued(context: Context, tenant: str, count: int, seed: int = 0) -> list[str]:
    """Solves of a tenant written as a server writes them."""
    from remat_service.requests.parse import Ask
    from remat_service.requests.read import find_request
    from remat_service.requests.submit import Submission
    from remat_service.tenants.keys import caller_of

    context.enqueue = Queue(context).enqueue
    async with context.database.write() as connection:
        if tenant == "default":
            caller = await default_caller(connection)
        else:
            caller = await caller_of(connection, await add_tenant(connection, tenant))
    ids = []
    for i in range(count):
        graph = training_graph(5, cost=1000 * (seed + 1) + i)
        ask = Ask(Problem(graph, plain_peak(graph)), time_limit_s=5, method="checkpoint-all")
        request_id = await Submission(context, caller, ask).submit()
        ids.append((await find_request(context, caller, request_id)).solve_id)
    return ids


async def test_a_takeover_keeps_the_bound_and_counts_its_own_wait(url: str) -> None:
    """The next worker's solver begins below what the last one's has claimed: what is told never goes back, but where a
    plan refutes it. The first run is no wait.
    """
    from remat_service.solving.outcome import Outcome
    from remat_service.solving.record import SolveRecord

    context = await _context(url)

    async def told(record: SolveRecord, outcome: Outcome, bound_ns: int) -> tuple[int, list[int]]:
        frame = {"type": "progress", "bound_ns": bound_ns, "whole_bound_ns": bound_ns, "restricted_to": []}
        await record.take(outcome, frame)
        async with context.database.read() as connection:
            points = (await connection.execute(select(events.c.bound_ns).order_by(events.c.seq))).scalars()
            return int(await connection.scalar(select(solves.c.bound_ns)) or 0), list(points)

    try:
        (solve_id,) = await _queued(context, "default", 1)
        async with context.database.write() as connection:
            await connection.execute(update(solves).values(queued_at=context.clock.now() - timedelta(hours=1)))
        old = await claim_solve(context, solve_id)
        assert old is not None
        assert 3590 < old.queued_s < 3700
        least = old.net.subject.total_cost_ns
        assert (await told(SolveRecord(context, old), Outcome(old.net, "auto", "d", 0), least + 90))[0] == least + 90
        assert (await Queue(context).reconcile_once()).requeued == 1
        new = await claim_solve(context, solve_id)
        assert new is not None
        assert new.queued_s < 100
        record, outcome = SolveRecord(context, new), Outcome(new.net, "auto", "d", 0)
        for said, kept in ((least + 40, least + 90), (least + 95, least + 95), (least + 60, least + 95)):
            bound, points = await told(record, outcome, said)
            assert bound == kept
            assert points == sorted(set(points))
    finally:
        await context.database.close()


@pytest.mark.slow
def test_a_server_that_solves_next_to_workers_says_so(tmp_path: Path, url: str) -> None:
    """In the log and in a metric, whoever comes first; no longer once the worker is gone."""
    folder = tmp_path / "worker"
    folder.mkdir()
    worker = Worker(folder, url, **SHORT)
    with serving(tmp_path, database_url=url, **SHORT) as server:
        eventually(lambda: server.metric("remat_second_queue_workers") == 1)
        log = (tmp_path / "service.log").read_text()
        assert log.count("set REMAT_DISPATCHER=cluster for all servers") == 1
        assert worker.stop() == 0
        eventually(lambda: server.metric("remat_second_queue_workers") == 0)
    with serving(tmp_path, database_url=url, dispatcher="cluster", **SHORT) as server:
        worker = Worker(folder, url, **SHORT)
        assert server.metric("remat_second_queue_workers") == 0
        worker.stop()


@pytest.mark.slow
def test_an_outage_is_two_lines_a_loop(tmp_path: Path) -> None:
    """The database away for some rounds of every loop: neither server nor worker logs a traceback, or a line twice."""
    for folder in (tmp_path / "server", tmp_path / "worker"):
        folder.mkdir()
    with PrivatePostgres() as private, fresh_database(private.url) as url:
        with serving(tmp_path / "server", database_url=url, dispatcher="cluster", **SHORT) as server:
            worker = Worker(tmp_path / "worker", url, **SHORT)
            private.stop()
            time.sleep(16)
            private.start()
            graph = training_graph(5)
            problem = Problem(graph, plain_peak(graph))
            eventually(lambda: server.http.get("/readyz").status_code == 200, 30)
            checked(problem, server.post(problem, time_limit_s=5)[1])
            worker.stop()
        for log in (tmp_path / "server" / "service.log", tmp_path / "worker" / "worker.log"):
            text = log.read_text()
            assert "Traceback" not in text, text[:5000]
            said = [line["event"] for line in map(json.loads, text.splitlines()) if "database" in line["event"]]
            assert any("does not answer" in event for event in said)
            assert len(said) == len(set(said)), said


async def test_who_lost_the_claim_writes_nothing(url: str) -> None:
    """A worker that was thought dead comes back: its writes are refused by the fencing token."""
    from remat_service.solving.claim import LostClaim
    from remat_service.solving.record import SolveRecord

    context = await _context(url)
    try:
        (solve_id,) = await _queued(context, "default", 1)
        old = await claim_solve(context, solve_id)
        assert old is not None
        assert await claim_solve(context, solve_id) is None
        assert (await Queue(context).reconcile_once()).requeued == 1  # no worker holds its ticket
        new = await claim_solve(context, solve_id)
        assert new is not None
        assert new.attempt == old.attempt + 1
        with pytest.raises(LostClaim):
            async with context.database.write() as connection:
                await SolveRecord(context, old).write(connection, {"cost_ns": 1})
        async with context.database.read() as connection:
            assert await connection.scalar(select(solves.c.cost_ns)) is None
    finally:
        await context.database.close()


async def test_tickets_come_with_their_solves_and_are_reconciled(url: str) -> None:
    """Enqueued in the same transaction, rolled back with it; lost ones are added, a dead worker's delivered again."""
    context = await _context(url)
    count = text("SELECT count(*) FROM procrastinate_jobs WHERE status = 'todo'")
    try:
        await _queued(context, "default", 3)
        async with context.database.read() as connection:
            assert await connection.scalar(count) == 3
        with pytest.raises(RuntimeError):
            await _enqueue_and_fail(context)
        async with context.database.write() as connection:
            assert await connection.scalar(count) == 3
            await connection.execute(text("DELETE FROM procrastinate_jobs WHERE id = 1"))
            await connection.execute(text("UPDATE procrastinate_jobs SET status = 'doing' WHERE id = 2"))
        assert await Queue(context).reconcile_once() == (0, 1, 1)
        assert await Queue(context).reconcile_once() == (0, 0, 0)
        async with context.database.read() as connection:
            assert await connection.scalar(count) == 3
    finally:
        await context.database.close()


async def test_what_a_dead_worker_held_is_put_back(url: str) -> None:
    """Its solve is queued again and its ticket delivered again; a live worker's solve stays; its upkeep is dropped."""
    context = await _context(url)
    queue = Queue(context)
    try:
        dead, alive = await _queued(context, "default", 2)
        worker = text("INSERT INTO procrastinate_workers (last_heartbeat) VALUES (now() - :s * interval '1 second')")
        async with context.database.write() as connection:
            await connection.execute(worker, [{"s": 60}, {"s": 0}])
            await connection.execute(
                text("UPDATE procrastinate_jobs SET status = 'doing', worker_id = id WHERE id IN (1, 2)")
            )
            await connection.execute(
                text(
                    "INSERT INTO procrastinate_jobs (queue_name, task_name, status, worker_id, args, queueing_lock) "
                    "VALUES ('remat-upkeep', 'remat.reconcile', 'doing', 1, '{}', 'remat.reconcile')"
                )
            )
        for ticket, solve_id in ((1, dead), (2, alive)):
            assert await claim_solve(context, solve_id, ticket) is not None
        assert await queue.reconcile_once() == (1, 1, 0)
        async with context.database.read() as connection:
            rows = (await connection.execute(select(solves.c.id, solves.c.state))).all()
            jobs = (await connection.execute(text("SELECT id, status::text FROM procrastinate_jobs ORDER BY id"))).all()
        assert {row.id: row.state for row in rows} == {dead: "queued", alive: "running"}
        assert [tuple(job) for job in jobs] == [(1, "todo"), (2, "doing")]
        assert await queue.reconcile_once() == (0, 0, 0)
    finally:
        await context.database.close()


def test_silence_outlasts_a_heartbeat() -> None:
    """A setting under which live workers would be taken for dead is refused in a sentence."""
    with pytest.raises(ValueError, match="at least three times REMAT_HEARTBEAT_S"):
        Settings(stale_after_s=5, heartbeat_s=2)


async def test_one_process_reconciles_at_a_time(url: str) -> None:
    """With a hundred workers, ninety-nine find that somebody is at it, and go on."""
    context = await _context(url)
    try:
        await _queued(context, "default", 1)
        async with context.database.write() as connection:
            await connection.execute(text("DELETE FROM procrastinate_jobs"))
        async with context.database.write() as other:
            await other.execute(text("SELECT pg_advisory_xact_lock(1919246704)"))
            assert (await Queue(context).reconcile_once()).added == 0
        assert (await Queue(context).reconcile_once()).added == 1
    finally:
        await context.database.close()


async def _enqueue_and_fail(context: Context) -> None:
    async with context.database.write() as connection:
        await Queue(context).enqueue(connection)
        raise RuntimeError


async def test_quotas_are_exact_between_servers(url: str) -> None:
    """Twelve POSTs at once through two servers, three allowed: three are queued, nine refused."""
    from remat_service.requests.parse import Ask
    from remat_service.requests.submit import Submission

    servers = [await _context(url), await _context(url)]
    try:
        async with servers[0].database.write() as connection:
            caller = await default_caller(connection)
            await connection.execute(text("UPDATE tenants SET most_queued = 3"))
        asks = [Ask(Problem(training_graph(5, cost=2000 + i), 10**9), time_limit_s=5) for i in range(12)]
        taken = await asyncio.gather(
            *(Submission(servers[i % 2], caller, ask).submit() for i, ask in enumerate(asks)), return_exceptions=True
        )
        assert sum(isinstance(found, RateLimited) for found in taken) == 9
        async with servers[0].database.read() as connection:
            assert await connection.scalar(text("SELECT count(*) FROM solves")) == 3
    finally:
        for server in servers:
            await server.database.close()


async def test_tenants_take_turns(url: str) -> None:
    """With one tenant's solve running, the other's is next, though it came later; a full tenant waits."""
    context = await _context(url)
    try:
        first = await _queued(context, "default", 3)
        second = await _queued(context, "others", 2, seed=1)
        assert await next_solve(context) == first[0]
        async with context.database.write() as connection:
            await connection.execute(
                text("UPDATE solves SET state = 'running', heartbeat_at = now() WHERE id = :id"), {"id": first[0]}
            )
        assert await next_solve(context) == second[0]
        async with context.database.write() as connection:
            await connection.execute(text("UPDATE tenants SET most_running = 0 WHERE name = 'others'"))
        assert await next_solve(context) == first[1]
    finally:
        await context.database.close()
