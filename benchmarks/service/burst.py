"""A tenth of a cluster's burst on a real server over PostgreSQL, next to what the queueing model says of it.

First what one miss and one hit cost on this machine, one after another. Then a minute with 100 new problems and 20 hits
for each, at random moments. The model is that of `benchmarks.service.capacity`: Poisson arrivals at the server's core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import psycopg

from benchmarks.harness.postgres import PrivatePostgres
from benchmarks.harness.serve import Processes
from benchmarks.harness.table import Report
from benchmarks.service.capacity import Costs, waiting_s
from benchmarks.service.crowd import ask, client, cpu_seconds, in_thread, post_of, sent, step
from remat_ir import Problem, plain_peak

_OPS, _STORED, _HITS_A_JOB = 300, 100, 20
_CALM_MISSES, _CALM_HITS = 50, 400
_WAITING = "SELECT count(*) FROM solves WHERE state <> 'ended'"
_CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"


class Posts:
    """POSTs over connections that stay open: who finds none free opens another."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, post: bytes, status: int, at: float = 0.0) -> float:
        """Seconds of one, sent at a moment of the event loop; it must be answered with a status."""
        await asyncio.sleep(at - asyncio.get_running_loop().time())
        begun = time.perf_counter()
        self._free = [link for link in self._free if not link[0].at_eof()]  # the server closes those that idle
        link = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        await sent(*link, post, status)
        self._free.append(link)
        return time.perf_counter() - begun


async def burst(folder: Path, options: argparse.Namespace) -> None:
    """Misses and hits of a minute on one server with one worker of two slots, and the model's figures for them."""
    jobs, hits = options.burst_jobs, options.burst_jobs * _HITS_A_JOB
    with (
        PrivatePostgres() as postgres,
        Processes(folder, postgres.url, dispatcher="cluster", workers=2) as processes,
        Report(f"{jobs} misses and {hits} hits in a minute", ("what", "the model", "measured"), options.out) as report,
        psycopg.connect(postgres.url, autocommit=True) as database,
    ):
        server = await in_thread(processes.serve)
        worker = await in_thread(processes.start, "worker")
        stored = [_asked(seed) for seed in range(_STORED)]
        new = [post_of(_asked(_STORED + i)) for i in range(_CALM_MISSES + jobs)]
        named = [post_of(stored[i % _STORED] | {"name": f"hit {i}"}) for i in range(_CALM_HITS + hits)]
        async with client(processes.port) as http:
            for i, asked in enumerate(stored):
                await ask(http, json.dumps(asked).encode(), f"stored{i}")
        posts, dice = Posts(processes.port), random.Random(1)
        miss = await _alone(server, posts, new[:_CALM_MISSES], 202)
        await _solved(database)
        hit = await _alone(server, posts, named[:_CALM_HITS], 200)
        report.add("server, a miss", f"{1000 * Costs.miss_s:.1f} ms", f"{1000 * miss[0]:.2f} ms, one after another")
        report.add("server, a hit of a new body", f"{1000 * Costs.hit_s:.1f} ms", f"{1000 * hit[0]:.2f} ms, likewise")

        sizes, spent = _sizes(database), _spent(server, worker, database)
        begun, soon = time.perf_counter(), asyncio.get_running_loop().time()
        times = await asyncio.gather(
            *(posts.send(body, 202, soon + dice.uniform(0, 60)) for body in new[_CALM_MISSES:]),
            *(posts.send(body, 200, soon + dice.uniform(0, 60)) for body in named[_CALM_HITS:]),
        )
        seconds = time.perf_counter() - begun
        (connections,) = database.execute(_CONNECTIONS).fetchone() or (0,)
        await _solved(database)
        emptied = time.perf_counter() - begun - seconds
        spent = tuple(after - then for after, then in zip(_spent(server, worker, database), spent, strict=True))
        of_requests, of_rest = (after - then for after, then in zip(_sizes(database), sizes, strict=True))

        service_s = (jobs * miss[0] + hits * hit[0]) / len(times)
        report.add("server, share of its core", f"{len(times) / 60 * service_s:.1%}", f"{spent[0] / seconds:.1%}")
        waited = fmean(times) - (jobs * miss[1] + hits * hit[1]) / len(times)
        wait_s = waiting_s(len(times) / 60, service_s, 1)
        report.add("mean wait for that core", f"{1000 * wait_s:.2f} ms", f"{1000 * waited:.2f} ms more than alone")
        for name, took, most_s in (("misses accepted", times[:jobs], 0.5), ("hits answered", times[jobs:], 0.05)):
            took.sort()
            quick = sum(each <= most_s for each in took) / len(took)
            p50, p99 = (1000 * took[int(share * (len(took) - 1))] for share in (0.5, 0.99))
            within = f"{quick:.1%} within {1000 * most_s:.0f} ms"
            report.add(name, "99 % in time", f"{within}, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        report.add("all solved", "–", f"{emptied:.1f} s after the minute")
        solve_s = (spent[1] + spent[2]) / jobs
        report.add(
            "a solve, besides solving", f"{1000 * Costs.solve_s:.0f} ms",
            f"{1000 * solve_s:.0f} ms of worker and PostgreSQL, hits of the minute counted in",
        )  # fmt: skip
        most = Costs.server_connections + Costs.worker_connections
        report.add("PostgreSQL, connections", most, connections - 1)
        report.add("bytes of an answer", Costs.answer_bytes, f"{of_rest / jobs:.0f}, but for its request")
        report.add("bytes of a request", Costs.hit_bytes, f"{of_requests / len(times):.0f}")


def _asked(seed: int) -> dict[str, Any]:
    graph = step(_OPS, 7_000_000 + seed)
    return {"problem": Problem(graph, plain_peak(graph)).to_json(), "method": "checkpoint-all", "time_limit_s": 60}


async def _alone(server: subprocess.Popen[str], posts: Posts, bodies: list[bytes], status: int) -> tuple[float, float]:
    """Processor seconds of the server, and seconds until the answer, of one of these after another."""
    spent = cpu_seconds(server)
    times = [await posts.send(body, status) for body in bodies]
    return (cpu_seconds(server) - spent) / len(times), fmean(times)


async def _solved(database: psycopg.Connection[Any]) -> None:
    """Wait until nothing waits or runs."""
    while (database.execute(_WAITING).fetchone() or (0,))[0]:
        await asyncio.sleep(0.2)


def _spent(
    server: subprocess.Popen[str], worker: subprocess.Popen[str], database: psycopg.Connection[Any]
) -> tuple[float, ...]:
    """Processor seconds of the server, the worker and PostgreSQL; solver children are not counted."""
    postmaster = psutil.Process(database.info.backend_pid).parent()
    assert postmaster is not None
    each = [process.cpu_times() for process in (postmaster, *postmaster.children())]
    return cpu_seconds(server), cpu_seconds(worker), sum(times.user + times.system for times in each)


def _sizes(database: psycopg.Connection[Any]) -> tuple[int, int]:
    """Bytes of the requests, and of all that is stored besides, indexes counted."""
    row = database.execute("SELECT pg_total_relation_size('requests'), pg_database_size('postgres')").fetchone()
    assert row is not None
    return row[0], row[1] - row[0]
