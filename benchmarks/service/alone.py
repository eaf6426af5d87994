"""Load on one server: hits against a bare route, misses, identical and distinct problems, kills and restarts."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from benchmarks.harness.serve import Processes
from benchmarks.harness.table import Report
from benchmarks.service.crowd import (
    JSON,
    ask,
    client,
    cpu_seconds,
    in_thread,
    load,
    many,
    one_after_another,
    post_of,
    step,
    timed,
    verified,
)
from remat_ir import Graph, Problem, budget_at, plain_peak

BARE = """
import sys, uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response
app, bodies = FastAPI(), {}
@app.put("/bytes/{name}")
async def put(name: str, request: Request): bodies[name] = await request.body()
@app.post("/bytes/{name}")
async def post(name: str, request: Request):
    await request.json()
    return Response(bodies[name], media_type="application/json")
@app.get("/bytes/{name}")
async def get(name: str): return Response(bodies[name], media_type="application/json")
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


async def hits(folder: Path, options: argparse.Namespace) -> None:
    """Cache hits, polled and posted, against a bare FastAPI route that returns the same bytes in the same run.

    The bare route parses the JSON of a POST, as any service that reads it must.

    POST: the same body again and again, as the ranks of a job send it. "POST, new body": the same graph in a body that
    this service has not seen, so that it is parsed and looked up. "POST, new graph": what another process has stored is
    asked for the first time of a server just started, so that the graph is read whole and digested, and the plan and
    its certificate are verified. CPU is that of the two servers: what another process on the machine changes least.
    """
    columns = (
        "ops", "call", "kB sent", "kB back", "p50 ms", "p99 ms", "a second",
        "bare p50", "bare p99", "bare a second", "ratio p50", "ratio p99", "ratio of rates", "ratio of CPU",
    )  # fmt: skip
    with (
        Processes(folder, workers=1, most_ops=100_000) as processes,
        Report("Cache hits against a bare FastAPI route", columns, options.out) as report,
    ):
        server = processes.serve()
        bare_port = processes.port + 1
        bare = subprocess.Popen([sys.executable, "-c", BARE, str(bare_port)], stderr=processes.log, text=True)
        processes.running.append(bare)
        async with client(processes.port) as http, client(bare_port) as plain:
            await _answers(plain)
            others = {ops: [_asked(step(ops, 100 + i)) for i in range(max(4, 12_000 // ops))] for ops in options.ops}
            for ops in options.ops:
                graph = step(ops, 1)
                asked = _asked(graph)
                body = json.dumps(asked).encode()
                data = await ask(http, body, f"hit{ops}")
                path = f"/v1/solves/{data['id']}"
                back = (await http.get(path)).content
                await plain.put(f"/bytes/{ops}", content=back)
                times = max(20, min(options.times, options.times * 300 // ops))
                fresh = (json.dumps(asked | {"time_limit_s": 60 + i / 1000}).encode() for i in range(10**9))
                both = _Both(report, server, bare, ops, len(back), partial(_post, plain, f"/bytes/{ops}", body))
                get = partial(plain.get, f"/bytes/{ops}")
                await both.measure("GET", 0, partial(http.get, path), times, get)
                await both.measure("POST", len(body), partial(_post, http, _SOLVES, body), times)
                await both.measure("POST, new body", len(body), lambda f=fresh: _post(http, _SOLVES, next(f)), times)
                for i, other in enumerate(others[ops]):
                    await ask(http, json.dumps(other).encode(), f"other{ops}-{i}")
            await in_thread(processes.end, server)
            server = await in_thread(processes.serve)
            for ops in options.ops:
                bodies = [json.dumps(other).encode() for other in others[ops]]
                back = (await plain.get(f"/bytes/{ops}")).content
                both = _Both(report, server, bare, ops, len(back), partial(_post, plain, f"/bytes/{ops}", bodies[0]))
                each = iter(bodies)
                await both.measure(
                    "POST, new graph", len(bodies[0]), lambda e=each: _post(http, _SOLVES, next(e)), len(bodies), warm=0
                )

    await _crowded(folder, options)


async def _crowded(folder: Path, options: argparse.Namespace) -> None:
    """Hits of 32 clients at once on one server: of the same body, of new bodies, and of new graphs after a restart."""
    columns = ("ops", "call", "hits", "a second", "p50 ms", "p99 ms", "longest ms")
    ops, inner = options.ops[0], folder / "crowd"
    inner.mkdir()
    with Processes(inner, workers=1) as processes, Report("Hits of 32 clients at once", columns, options.out) as report:
        server = await in_thread(processes.serve)
        asked = [_asked(step(ops, 5000 + i)) for i in range(options.times // 4)]
        async with client(processes.port) as http:
            for i, each in enumerate(asked):
                await ask(http, json.dumps(each).encode(), f"crowd{i}")
        bodies = {
            "POST": [asked[0]] * 4 * options.times,
            "POST, new body": [asked[0] | {"time_limit_s": 60 + i / 1000} for i in range(2 * options.times)],
            "POST, new graph": asked,
        }
        for name, sent in bodies.items():
            if name == "POST, new graph":
                await in_thread(processes.end, server)
                await in_thread(processes.serve)
            posts = [post_of(each) for each in sent]
            begun = time.perf_counter()
            times = sorted(await load(processes.port, posts, 200))
            rate = len(times) / (time.perf_counter() - begun)
            some = (times[len(times) // 2], times[int(0.99 * (len(times) - 1))], times[-1])
            report.add(ops, name, len(times), f"{rate:.0f}", *(f"{1000 * each:.1f}" for each in some))


async def _answers(http: httpx2.AsyncClient) -> None:
    """Wait until a server listens."""
    for _ in range(600):
        try:
            await http.get("/")
            return
        except httpx2.ConnectError:
            await asyncio.sleep(0.1)
    raise SystemExit("the bare route did not start")


_SOLVES = "/v1/solves"


def _asked(graph: Graph) -> dict[str, Any]:
    return {"problem": Problem(graph, plain_peak(graph)).to_json(), "method": "checkpoint-all"}


def _post(http: httpx2.AsyncClient, path: str, content: bytes) -> Awaitable[httpx2.Response]:
    return http.post(path, content=content, headers=JSON)


class _Both(NamedTuple):
    """The service and the bare route, asked in turns, so that a busy machine is busy for both."""

    report: Report
    server: subprocess.Popen[str]
    bare: subprocess.Popen[str]
    ops: int
    back: int
    bare_post: Callable[[], Awaitable[httpx2.Response]]

    async def measure(
        self,
        name: str,
        sent: int,
        mine: Callable[[], Awaitable[httpx2.Response]],
        times: int,
        theirs: Callable[[], Awaitable[httpx2.Response]] | None = None,
        warm: int = 3,
    ) -> None:
        """One row of the table."""
        theirs = theirs or self.bare_post
        await timed(mine, warm), await timed(theirs, 3)
        ours: list[float] = []
        base: list[float] = []
        spent = [0.0, 0.0]
        for _ in range(4):
            spent[0] -= cpu_seconds(self.server)
            ours += await timed(mine, times // 4)
            spent[0] += cpu_seconds(self.server)
            spent[1] -= cpu_seconds(self.bare)
            base += await timed(theirs, times // 4)
            spent[1] += cpu_seconds(self.bare)
        ours.sort(), base.sort()
        middle, last = len(ours) // 2, int(0.99 * (len(ours) - 1))
        rate, bare_rate = len(ours) / sum(ours), len(base) / sum(base)
        self.report.add(
            self.ops, name, f"{sent / 1000:.0f}", f"{self.back / 1000:.0f}",
            f"{1000 * ours[middle]:.2f}", f"{1000 * ours[last]:.2f}", f"{rate:.0f}",
            f"{1000 * base[middle]:.2f}", f"{1000 * base[last]:.2f}", f"{bare_rate:.0f}",
            f"{ours[middle] / base[middle]:.2f}", f"{ours[last] / base[last]:.2f}",
            f"{bare_rate / rate:.2f}", f"{spent[0] / spent[1]:.2f}" if spent[1] else "–",
        )  # fmt: skip


_MISSES = ("ops", "misses", "CPU ms a miss", "a second", "p50 ms", "p99 ms")


async def misses(folder: Path, options: argparse.Namespace) -> None:
    """Distinct problems that nobody has asked for before, over 32 connections to one server on SQLite, none solved.

    Each answer has to be a 202, which the service gives once the solve is committed. The dispatch is held back: the
    tenant may have no solve running.
    """
    with Report("Misses, queued and not solved", _MISSES, options.out) as report:
        for ops in options.miss_ops:
            inner = folder / str(ops)
            inner.mkdir()
            with Processes(inner, workers=1, most_queued=1_000_000) as processes:
                server = processes.serve()
                await one_after_another(processes.port, iter([_request(ops, 0)]), 202)
                with closing(sqlite3.connect(inner / "load.sqlite", isolation_level=None)) as database:
                    database.execute("UPDATE tenants SET most_running = 0")
                bodies = [_request(ops, 1 + seed) for seed in range(options.misses)]
                spent, begun = cpu_seconds(server), time.perf_counter()
                times = await load(processes.port, bodies, 202)
                seconds, spent = time.perf_counter() - begun, cpu_seconds(server) - spent
                with closing(sqlite3.connect(inner / "load.sqlite")) as database:
                    (queued,) = database.execute("SELECT count(*) FROM solves WHERE state = 'queued'").fetchone()
                if queued < len(bodies):
                    raise SystemExit(f"{len(bodies)} were answered 202, and {queued} wait")
            times.sort()
            report.add(
                ops, len(times), f"{1000 * spent / len(times):.2f}", f"{len(times) / seconds:.0f}",
                f"{1000 * times[len(times) // 2]:.1f}", f"{1000 * times[int(0.99 * (len(times) - 1))]:.1f}",
            )  # fmt: skip


def _request(ops: int, seed: int) -> bytes:
    graph = step(ops, 1_000_000 * ops + seed)
    return post_of({"problem": Problem(graph, budget_at(graph, 0.7)).to_json(), "time_limit_s": 60})


async def identical(folder: Path, options: argparse.Namespace) -> None:
    """Identical POSTs at once: one solve, equal answers; first on an easy problem, then on one that takes a while."""
    columns = ("problem", "POSTs", "solves", "different answers", "different ids", "seconds", "a second")
    with Report("Identical POSTs at once", columns, options.out) as report:
        for name, graph, fraction in (("at the plain peak", step(300, 2), 1.0), ("at half of it", step(300, 3), 0.5)):
            inner = folder / name.replace(" ", "-")
            inner.mkdir()
            problem = Problem(graph, budget_at(graph, fraction))
            with Processes(inner, workers=2) as processes:
                found, seconds, solved = await _at_once(processes, problem, options.identical)
            own = ("id", "cache", "seconds", "message", "limit")
            different = {json.dumps({k: v for k, v in data.items() if k not in own}) for data in found}
            ids = {data["id"] for data in found}
            report.add(
                name, len(found), f"{solved:g}", len(different), len(ids), f"{seconds:.1f}",
                f"{len(found) / seconds:.0f}",
            )  # fmt: skip
            if solved != 1 or len(different) != 1 or len(ids) != len(found):
                raise SystemExit(1)


async def _at_once(processes: Processes, problem: Problem, count: int) -> tuple[list[dict[str, Any]], float, float]:
    """Verified answers to as many equal POSTs at once; how many seconds they took, and how many solves."""
    processes.serve()
    body = json.dumps({"problem": problem.to_json(), "time_limit_s": 10, "max_gap": 0.0}).encode()
    begun = time.perf_counter()
    async with client(processes.port, 1000) as http:
        found = await asyncio.gather(*(ask(http, body, f"same{i}") for i in range(count)))
        seconds = time.perf_counter() - begun
    async with client(processes.port) as http:  # the server may have closed idle connections of the crowd
        metrics = (await http.get("/metrics")).text
    for data in found:
        verified(problem, data)
    rows = [row for row in metrics.splitlines() if row.startswith("remat_solve_seconds_count")]
    return found, seconds, sum(float(row.rsplit(" ", 1)[1]) for row in rows)


async def distinct(folder: Path, options: argparse.Namespace) -> None:
    """Distinct small problems, undisturbed."""
    await _distinct(folder, options, "Distinct problems", 10_000, 0)


async def killed(folder: Path, options: argparse.Namespace) -> None:
    """The same while the server is killed with SIGKILL and started again."""
    await _distinct(folder, options, "Distinct problems while the server is killed", 50_000, options.kills)


async def _distinct(folder: Path, options: argparse.Namespace, title: str, seed: int, most_kills: int) -> None:
    columns = ("problems", "kills", "seconds", "a second", "lost", "wrong")
    with Processes(folder, workers=2) as processes, Report(title, columns, options.out) as report:
        server = processes.serve()
        work = asyncio.create_task(many(processes.port, options.distinct, 40, seed))
        kills = 0
        while not work.done() and kills < most_kills:
            await asyncio.sleep(options.every)
            if work.done():
                break
            await in_thread(processes.end, server, signal.SIGKILL)
            server = await in_thread(processes.serve)
            kills += 1
        count, seconds = await work
        report.add(count, kills, f"{seconds:.1f}", f"{count / seconds:.1f}", 0, 0)
