"""Load on a cluster: workers on a PostgreSQL of the run's own, killed and restarted while problems come in."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import psycopg
from pydantic import SecretStr

from benchmarks.harness.postgres import PrivatePostgres
from benchmarks.harness.serve import Processes
from benchmarks.harness.table import Report
from benchmarks.service.crowd import in_thread, many
from remat_service.context import Context
from remat_service.settings import Settings
from remat_service.solving.cluster import Fleet
from remat_service.storage.queue import Claimed

_OPS = 40
_STORED = """
SELECT (SELECT count(*) FROM solves), (SELECT count(DISTINCT flight_key) FROM solves),
       (SELECT count(*) FROM solves WHERE state <> 'ended'), (SELECT count(*) FROM requests WHERE NOT ended),
       (SELECT count(*) FROM graphs g WHERE NOT EXISTS (SELECT 1 FROM plans p WHERE p.graph_key = g.key)),
       (SELECT count(*) FROM solves WHERE attempt > 1),
       (SELECT avg(extract(epoch FROM ended_at - started_at)) FROM solves),
       (SELECT avg((outcome->>'seconds')::float) FROM solves)
"""


class Stored(NamedTuple):
    """What the database holds at the end."""

    solves: int
    flights: int
    open_solves: int
    open_requests: int
    without_plan: int
    again: int
    whole_s: float
    solving_s: float

    @property
    def not_solving(self) -> str:
        """Milliseconds of a solve, from claim to end, in which its child was not solving, and their share."""
        rest = float(self.whole_s) - self.solving_s
        return f"{1000 * rest:.0f} ms, {100 * rest / float(self.whole_s):.0f} %"


class Trial(NamedTuple):
    """One run: problems, seconds, kills, restarts and what is stored."""

    count: int
    seconds: float
    kills: int
    restarts: int
    stored: Stored

    @property
    def rate(self) -> float:
        """Problems a second."""
        return self.count / self.seconds


async def trial(
    folder: Path, count: int, workers: int, fraction: float = 1.0, kill_every_s: float | None = None, restarts: int = 0
) -> Trial:
    """Distinct problems through one server and some workers, each answer verified.

    Raises:
        SystemExit: an answer is lost or wrong, a problem was solved in two flights, or a row is left open.
    """
    folder.mkdir()
    settings = {"dispatcher": "cluster", "workers": 1, "stale_after_s": 4, "heartbeat_s": 1}
    with PrivatePostgres() as postgres:
        with Processes(folder, postgres.url, **settings) as processes:
            processes.serve()
            alive = [processes.start("worker") for _ in range(workers)]
            work = asyncio.create_task(many(processes.port, count, _OPS, 90_000, fraction))
            kills, restarted, beats = 0, 0, 0
            while not work.done():
                await asyncio.sleep(kill_every_s or 1.0)
                if kill_every_s is None or work.done():
                    continue
                beats += 1
                if restarted < restarts and beats % 3 == 0:
                    await in_thread(postgres.stop)
                    await asyncio.sleep(1.0)
                    await in_thread(postgres.start)
                    restarted += 1
                else:
                    await in_thread(processes.end, alive.pop(0), signal.SIGKILL)
                    alive.append(await in_thread(processes.start, "worker"))
                    kills += 1
            done, seconds = await work
        with psycopg.connect(postgres.url) as connection:
            row = connection.execute(_STORED).fetchone()
        assert row is not None
        stored = Stored(*row)
    if stored.flights != count or stored.open_solves or stored.open_requests or stored.without_plan:
        raise SystemExit(f"{count} asked: {stored}")
    return Trial(done, seconds, kills, restarted, stored)


async def scaling(folder: Path, options: argparse.Namespace) -> None:
    """Throughput against the number of workers: problems that are trivial, and problems that take some solving."""
    columns = ("budget", "workers", "problems", "seconds", "a second", "not solving, a solve")
    with Report("Throughput against workers", columns, options.out) as report:
        for fraction in options.budgets:
            share = 10 if fraction >= 1.0 else 50  # what takes solving takes longer
            for workers in options.workers:
                inner = folder / f"{workers}-{fraction}"
                found = await trial(inner, max(20, options.jobs // share), workers, fraction)
                report.add(
                    f"{fraction:g}", workers, found.count, f"{found.seconds:.1f}", f"{found.rate:.1f}",
                    found.stored.not_solving,
                )  # fmt: skip


async def cluster(folder: Path, options: argparse.Namespace) -> None:
    """Undisturbed, then with a worker killed every few seconds and PostgreSQL restarted twice."""
    columns = (
        "workers", "problems", "kills", "restarts", "seconds", "a second", "lost", "wrong", "solved twice",
        "taken up again", "not solving, a solve",
    )  # fmt: skip
    workers = options.workers[-1]
    with Report("A cluster disturbed", columns, options.out) as report:
        for name, every, restarts in (("calm", None, 0), ("disturbed", options.every, 2)):
            found = await trial(folder / name, options.jobs, workers, 1.0, every, restarts)
            report.add(
                workers, found.count, found.kills, found.restarts, f"{found.seconds:.1f}", f"{found.rate:.1f}", 0, 0,
                found.stored.solves - found.stored.flights, found.stored.again, found.stored.not_solving,
            )  # fmt: skip


_FILL = """
INSERT INTO solves (id, tenant_id, flight_key, graph_key, budget_bytes, fixed_bytes, method, method_key, options, state,
                    priority, restricted_to, queued_at)
SELECT lpad(to_hex(i), 32, '0'), t.id, lpad(to_hex(i), 64, '0'), g.key, i, 0, 'auto', 'auto', '{}', 'queued', 0, '',
       now()
FROM generate_series(1, %s) AS i, (SELECT id FROM tenants LIMIT 1) AS t, (SELECT key FROM graphs LIMIT 1) AS g
"""


async def depth(folder: Path, options: argparse.Namespace) -> None:
    """What a long queue costs those who look at it, and how many connections each process keeps open."""
    columns = ("queued", "claim and give back ms", "upkeep ms", "connections of server and worker")
    with PrivatePostgres() as postgres, Report("A long queue", columns, options.out) as report:
        connections = await _connections(folder, postgres.url)
        key = SecretStr(secrets.token_hex(32))
        context = Context(Settings(database_url=SecretStr(postgres.url), dispatcher="cluster", seal_key=key))
        fleet = Fleet(context)
        context.queue.carry = fleet.carry
        for queued in (100, 1_000, 10_000):
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute("DELETE FROM solves WHERE state = 'queued'")
                connection.execute(_FILL, (queued,))
                connection.execute("ANALYZE")
            await fleet.once()
            looks, rounds = [], []
            for _ in range(20):
                begun = time.perf_counter()
                claimed = await context.queue.claim("benchmark")
                assert isinstance(claimed, Claimed)
                async with context.database.write() as write:
                    await context.queue.settle(write, claimed, {"state": "queued"})
                looks.append(time.perf_counter() - begun)
                begun = time.perf_counter()
                await fleet.once()
                rounds.append(time.perf_counter() - begun)
            report.add(
                queued, f"{1000 * statistics.median(looks):.1f}", f"{1000 * statistics.median(rounds):.1f}",
                f"{connections[0]}, {connections[1]}",
            )  # fmt: skip
        await context.database.close()


async def _connections(folder: Path, url: str) -> tuple[int, int]:
    """How many connections a server and a worker keep open after some problems."""
    busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres' AND pid <> pg_backend_pid()"
    with Processes(folder, url, dispatcher="cluster", workers=1) as processes:
        processes.serve()
        worker = processes.start("worker")
        await many(processes.port, 40, _OPS, 5)
        with psycopg.connect(url, autocommit=True) as connection:
            both = connection.execute(busy).fetchone()
            await in_thread(processes.end, worker)
            alone = connection.execute(busy).fetchone()
    assert both is not None
    assert alone is not None
    return alone[0], both[0] - alone[0]
