"""Load on a running service: hits against a bare route, identical and distinct problems, kills and restarts.

`python -m benchmarks.load [hits|identical|distinct|killed|cluster] …` prints one table a scenario. Each starts its own
service on a free port with a temporary database; `cluster` needs PostgreSQL (`REMAT_TEST_DATABASE_URL`). Every answer's
plan is replayed by the judge on the problem as it was sent; a lost or wrong answer ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from remat_ir import Answer, Graph, Problem, graph_of, plain_peak, verify

console = Console(width=120)
JSON = {"Content-Type": "application/json"}
BARE = """
import sys, uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response
app, bodies = FastAPI(), {}
@app.put("/bytes/{name}")
async def put(name: str, request: Request): bodies[name] = await request.body()
@app.post("/bytes/{name}")
async def post(name: str, request: Request):
    await request.body()
    return Response(bodies[name], media_type="application/json")
@app.get("/bytes/{name}")
async def get(name: str): return Response(bodies[name], media_type="application/json")
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


def step(ops: int, seed: int) -> Graph:
    """A training step of `ops` ops: a forward pass with skips and its backward pass."""
    dice, layers = random.Random(seed), ops // 2
    inputs = [[]] + [sorted({i - 1, dice.randrange(i)}) for i in range(1, layers)]
    for back in range(layers):
        layer = layers - 1 - back
        inputs.append(sorted({(layers + back - 1) if back else layers - 1, layer, *inputs[layer]}))
    costs = [dice.randrange(1_000, 100_000) for _ in range(2 * layers)]
    sizes = [dice.randrange(1_000, 1_000_000) for _ in range(2 * layers)]
    return graph_of(costs, sizes, inputs, backward_from=layers)


class Processes:
    """What a scenario has started, ended with it."""

    def __init__(self, folder: Path, url: str | None = None, **settings: Any) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "REMAT_DATABASE_URL": url or f"sqlite:///{folder}/load.sqlite",
            "REMAT_LOG_LEVEL": "WARNING",
            **{"REMAT_" + name.upper(): str(value) for name, value in settings.items()},
        }
        self.log = (folder / "log").open("a")
        self.running: list[subprocess.Popen[str]] = []
        self.port = 0

    def start(self, *arguments: str, ready: str = "ready") -> subprocess.Popen[str]:
        """A `remat-service` process, once it says that it is ready."""
        process = subprocess.Popen(
            [sys.executable, "-m", "remat_service.cli", *arguments],
            env=self.environment, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if ready not in line:
            raise SystemExit(f"{arguments} did not start; see {self.folder}/log")
        found = re.search(r"http://[^:]+:(\d+)", line)
        if found:
            self.port = int(found.group(1))
        self.running.append(process)
        return process

    def serve(self) -> subprocess.Popen[str]:
        """The server, on the same port again after the first time."""
        return self.start("serve", "--port", str(self.port))

    def end(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
        """Signal one and wait."""
        if process.poll() is None:
            process.send_signal(number)
        process.wait(60)
        self.running.remove(process)

    def close(self) -> None:
        """End all."""
        for process in list(self.running):
            self.end(process)
        self.log.close()


def judged(problem: Problem, data: dict[str, Any]) -> None:
    """An answer is an optimum or a plan that the judge passes; else the run has failed."""
    answer = Answer.from_json(data)
    if answer.plan is None:
        raise SystemExit(f"no plan for {data['id']}: {data['status']} {data['message']}")
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)


async def ask(http: httpx2.AsyncClient, body: bytes, key: str, patience_s: float = 120.0) -> dict[str, Any]:
    """One problem to its end, across refused connections and restarts: POST with a key, then long-poll."""
    until = time.monotonic() + patience_s
    solve_id: str | None = None
    while time.monotonic() < until:
        try:
            if solve_id is None:
                headers = JSON | {"Prefer": "wait=20", "Idempotency-Key": key}
                reply = await http.post("/v1/solves", content=body, headers=headers)
            else:
                reply = await http.get(f"/v1/solves/{solve_id}", params={"wait": 20})
            if reply.status_code in (200, 202):
                data: dict[str, Any] = reply.json()
                solve_id = data["id"]
                if reply.status_code == 200:
                    return data
                continue
            if reply.status_code < 500 and reply.status_code != 429:
                raise SystemExit(f"refused: {reply.status_code} {reply.text[:300]}")
        except httpx2.HTTPError:
            pass
        await asyncio.sleep(0.2 + random.random() * 0.3)
    raise SystemExit(f"lost: request {solve_id} had no answer within {patience_s:g} s")


def client(port: int, limit: int = 200) -> httpx2.AsyncClient:
    """A client with room for many requests at once."""
    limits = httpx2.Limits(max_connections=limit, max_keepalive_connections=limit)
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=90.0, limits=limits, trust_env=False)


async def timed(work: Callable[[], Awaitable[httpx2.Response]], times: int) -> list[float]:
    """Seconds of each of `times` calls, one after another."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        reply = await work()
        found.append(time.perf_counter() - begun)
        assert reply.status_code == 200, reply.text[:300]
    return sorted(found)


async def hits(folder: Path, options: argparse.Namespace) -> None:
    """Cache hits, polled and posted, against a bare FastAPI route that returns the same bytes in the same run."""
    processes = Processes(folder, workers=1, most_ops=100_000)
    processes.serve()
    bare_port = processes.port + 1
    bare = subprocess.Popen([sys.executable, "-c", BARE, str(bare_port)], stderr=processes.log)
    table = Table(
        "ops", "call", "kB back", "p50 ms", "p99 ms", "a second", "bare p50 ms", "ratio p50", title="cache hits"
    )
    try:
        await asyncio.sleep(5)
        async with client(processes.port) as http, client(bare_port) as plain:
            for ops in options.ops:
                graph = step(ops, 1)
                body = json.dumps(
                    {"problem": Problem(graph, plain_peak(graph)).to_json(), "method": "checkpoint-all"}
                ).encode()
                data = await ask(http, body, f"hit{ops}")
                path = f"/v1/solves/{data['id']}"
                back = (await http.get(path)).content
                await plain.put(f"/bytes/{ops}", content=back)
                times = max(20, min(options.times, options.times * 300 // ops))
                for name, mine, theirs in (
                    ("GET", lambda p=path: http.get(p), lambda n=ops: plain.get(f"/bytes/{n}")),
                    (
                        "POST",
                        lambda b=body: http.post("/v1/solves", content=b, headers=JSON),
                        lambda b=body, n=ops: plain.post(f"/bytes/{n}", content=b, headers=JSON),
                    ),
                ):
                    await timed(mine, 3), await timed(theirs, 3)
                    ours: list[float] = []
                    base: list[float] = []
                    for _ in range(4):  # in turns, so that a busy machine is busy for both
                        ours += await timed(mine, times // 4)
                        base += await timed(theirs, times // 4)
                    ours.sort()
                    p50, bare50 = statistics.median(ours), statistics.median(base)
                    table.add_row(
                        str(ops), name, f"{len(back) / 1000:.0f}", f"{1000 * p50:.2f}",
                        f"{1000 * ours[int(0.99 * (len(ours) - 1))]:.2f}", f"{len(ours) / sum(ours):.0f}",
                        f"{1000 * bare50:.2f}", f"{p50 / bare50:.2f}",
                    )  # fmt: skip
    finally:
        bare.terminate()
        bare.wait()
        processes.close()
    console.print(table)


async def identical(folder: Path, options: argparse.Namespace) -> None:
    """Identical POSTs at once: one solve, equal answers."""
    processes = Processes(folder, workers=2)
    processes.serve()
    graph = step(300, 2)
    problem = Problem(graph, plain_peak(graph))
    body = json.dumps({"problem": problem.to_json(), "time_limit_s": 30}).encode()
    begun = time.perf_counter()
    async with client(processes.port, 1000) as http:
        found = await asyncio.gather(*(ask(http, body, f"same{i}") for i in range(options.identical)))
        seconds = time.perf_counter() - begun
    async with client(processes.port) as http:  # the server may have closed idle connections of the crowd
        metrics = (await http.get("/metrics")).text
    processes.close()
    judged(problem, found[0])
    solved = sum(
        float(row.rsplit(" ", 1)[1]) for row in metrics.splitlines() if row.startswith("remat_solve_seconds_count")
    )
    table = Table("POSTs", "solves", "different answers", "different ids", "seconds", "a second", title="identical")
    different = {json.dumps({k: v for k, v in d.items() if k not in ("id", "cache", "seconds")}) for d in found}
    ids = {data["id"] for data in found}
    table.add_row(
        str(len(found)),
        f"{solved:g}",
        str(len(different)),
        str(len(ids)),
        f"{seconds:.1f}",
        f"{len(found) / seconds:.0f}",
    )
    console.print(table)
    if solved != 1 or len(different) != 1 or len(ids) != len(found):
        raise SystemExit(1)


async def many(port: int, count: int, ops: int, seed: int) -> tuple[int, float]:
    """Distinct small problems, each judged: how many, in how many seconds."""
    graphs = [step(ops, seed + i) for i in range(count)]
    problems = [Problem(graph, plain_peak(graph)) for graph in graphs]
    bodies = [
        json.dumps({"problem": p.to_json(), "time_limit_s": 20, "queue_limit_s": 3000}).encode() for p in problems
    ]
    gate = asyncio.Semaphore(100)
    begun = time.perf_counter()
    async with client(port) as http:

        async def one(i: int) -> dict[str, Any]:
            async with gate:
                return await ask(http, bodies[i], f"{seed}-{i}", 900.0)

        found = await asyncio.gather(*(one(i) for i in range(count)))
    seconds = time.perf_counter() - begun
    for problem, data in zip(problems, found, strict=True):
        judged(problem, data)
    return len(found), seconds


async def distinct(folder: Path, options: argparse.Namespace) -> None:
    """Distinct small problems, undisturbed."""
    processes = Processes(folder, workers=2)
    processes.serve()
    count, seconds = await many(processes.port, options.distinct, 40, 10_000)
    processes.close()
    table = Table("problems", "seconds", "a second", "lost", "wrong", title="distinct, undisturbed")
    table.add_row(str(count), f"{seconds:.1f}", f"{count / seconds:.1f}", "0", "0")
    console.print(table)


async def killed(folder: Path, options: argparse.Namespace) -> None:
    """The same while the server is killed with SIGKILL and started again."""
    processes = Processes(folder, workers=2)
    server = processes.serve()
    work = asyncio.create_task(many(processes.port, options.distinct, 40, 50_000))
    kills = 0
    while not work.done() and kills < options.kills:
        await asyncio.sleep(options.every)
        if work.done():
            break
        await asyncio.to_thread(processes.end, server, signal.SIGKILL)
        server = await asyncio.to_thread(processes.serve)
        kills += 1
    count, seconds = await work
    processes.close()
    table = Table("problems", "kills", "seconds", "a second", "lost", "wrong", title="distinct, server killed")
    table.add_row(str(count), str(kills), f"{seconds:.1f}", f"{count / seconds:.1f}", "0", "0")
    console.print(table)


async def cluster(folder: Path, options: argparse.Namespace) -> None:
    """Workers on PostgreSQL: throughput against their number, then with one killed every few seconds."""
    import psycopg

    server_url = os.environ.get("REMAT_TEST_DATABASE_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
    table = Table(
        "workers", "problems", "kills", "seconds", "a second", "plans", "requests", "not solving", title="cluster"
    )
    for workers, kill in [(n, False) for n in options.workers] + [(options.workers[-1], True)]:
        name = f"remat_load_{os.getpid()}_{workers}_{int(kill)}"
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        url = server_url.rsplit("/", 1)[0] + "/" + name
        processes = Processes(folder, url, dispatcher="cluster", workers=1, stale_after_s=4, heartbeat_s=1)
        processes.serve()
        alive = [processes.start("worker") for _ in range(workers)]
        work = asyncio.create_task(many(processes.port, options.cluster, 40, 90_000))
        kills = 0
        while not work.done():
            await asyncio.sleep(options.every if kill else 1.0)
            if kill and not work.done():
                await asyncio.to_thread(processes.end, alive.pop(0), signal.SIGKILL)
                alive.append(await asyncio.to_thread(processes.start, "worker"))
                kills += 1
        count, seconds = await work
        processes.close()
        with psycopg.connect(url) as connection:
            plans, requests, share = connection.execute(
                "SELECT (SELECT count(*) FROM plans), (SELECT count(*) FROM requests WHERE ended), "
                "(SELECT 1 - sum((outcome->>'seconds')::float) / "
                "nullif(sum(extract(epoch FROM ended_at - started_at)), 0) FROM solves)"
            ).fetchone()  # type: ignore[misc]
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        table.add_row(
            str(workers), str(count), str(kills), f"{seconds:.1f}", f"{count / seconds:.1f}", str(plans), str(requests),
            f"{100 * (share or 0):.0f} %",
        )  # fmt: skip
        if requests != count:
            raise SystemExit(f"{count} asked, {requests} ended")
    console.print(table)


def main() -> None:
    """Run the scenarios named, or all but `cluster`."""
    scenarios = {"hits": hits, "identical": identical, "distinct": distinct, "killed": killed, "cluster": cluster}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("scenario", nargs="*", choices=[*scenarios, []], default=[])
    parser.add_argument("--ops", type=int, nargs="+", default=[300, 3000, 30000])
    parser.add_argument("--times", type=int, default=1000, help="requests at 300 ops; fewer at more")
    parser.add_argument("--identical", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between kills")
    parser.add_argument("--cluster", type=int, default=1000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    for name in options.scenario or ["hits", "identical", "distinct", "killed"]:
        with tempfile.TemporaryDirectory(prefix="remat-load-") as folder:
            asyncio.run(scenarios[name](Path(folder), options))


if __name__ == "__main__":
    main()
