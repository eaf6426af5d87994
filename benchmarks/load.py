"""Load on a running service: hits against a bare route, identical and distinct problems, kills and restarts.

`python -m benchmarks.load [hits|identical|distinct|killed|scaling|cluster|depth] …` prints one table a scenario, and
appends it to `--out FILE`. Each starts its own service on a free port with a temporary database; those from `scaling`
on start PostgreSQL servers of their own. Every answer's plan is replayed by the judge on the problem as it was sent; a
lost or wrong answer ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import httpx2

from remat_ir import Problem, budget_at, plain_peak

from .crowd import JSON, Processes, Report, ask, client, judged, many, step, timed
from .load_cluster import cluster, depth, scaling

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


async def hits(folder: Path, options: argparse.Namespace) -> Report:
    """Cache hits, polled and posted, against a bare FastAPI route that returns the same bytes in the same run.

    POST: the same body again and again, as the ranks of a job send it. "POST, new body": the same problem in a body
    that this service has not seen, so that it is parsed, digested and looked up.
    """
    processes = Processes(folder, workers=1, most_ops=100_000)
    processes.serve()
    bare_port = processes.port + 1
    bare = subprocess.Popen([sys.executable, "-c", BARE, str(bare_port)], stderr=processes.log)
    report = Report(
        "Cache hits against a bare FastAPI route",
        ("ops", "call", "kB sent", "kB back", "p50 ms", "p99 ms", "a second",
         "bare p50", "bare p99", "bare a second", "ratio p50", "ratio p99", "ratio of rates"),
    )  # fmt: skip
    try:
        await asyncio.sleep(5)
        async with client(processes.port) as http, client(bare_port) as plain:
            for ops in options.ops:
                graph = step(ops, 1)
                problem = {"problem": Problem(graph, plain_peak(graph)).to_json(), "method": "checkpoint-all"}
                body = json.dumps(problem).encode()
                data = await ask(http, body, f"hit{ops}")
                path = f"/v1/solves/{data['id']}"
                back = (await http.get(path)).content
                await plain.put(f"/bytes/{ops}", content=back)
                times = max(20, min(options.times, options.times * 300 // ops))
                fresh = (json.dumps(problem | {"time_limit_s": 60 + i / 1000}).encode() for i in range(10**9))

                def post(content: bytes) -> Awaitable[httpx2.Response]:
                    return http.post("/v1/solves", content=content, headers=JSON)

                def bare_post(body: bytes = body, name: int = ops) -> Awaitable[httpx2.Response]:
                    return plain.post(f"/bytes/{name}", content=body, headers=JSON)

                for name, sent, mine, theirs in (
                    ("GET", 0, lambda p=path: http.get(p), lambda n=ops: plain.get(f"/bytes/{n}")),
                    ("POST", len(body), lambda b=body: post(b), bare_post),
                    ("POST, new body", len(body), lambda f=fresh: post(next(f)), bare_post),
                ):
                    await timed(mine, 3), await timed(theirs, 3)
                    ours: list[float] = []
                    base: list[float] = []
                    for _ in range(4):  # in turns, so that a busy machine is busy for both
                        ours += await timed(mine, times // 4)
                        base += await timed(theirs, times // 4)
                    ours.sort(), base.sort()
                    middle, last = len(ours) // 2, int(0.99 * (len(ours) - 1))
                    rate, bare_rate = len(ours) / sum(ours), len(base) / sum(base)
                    report.add(
                        ops, name, f"{sent / 1000:.0f}", f"{len(back) / 1000:.0f}",
                        f"{1000 * ours[middle]:.2f}", f"{1000 * ours[last]:.2f}", f"{rate:.0f}",
                        f"{1000 * base[middle]:.2f}", f"{1000 * base[last]:.2f}", f"{bare_rate:.0f}",
                        f"{ours[middle] / base[middle]:.2f}", f"{ours[last] / base[last]:.2f}",
                        f"{bare_rate / rate:.2f}",
                    )  # fmt: skip
    finally:
        bare.terminate()
        bare.wait()
        processes.close()
    return report


async def identical(folder: Path, options: argparse.Namespace) -> Report:
    """Identical POSTs at once: one solve, equal answers; first on an easy problem, then on one that takes a while."""
    report = Report(
        "Identical POSTs at once",
        ("problem", "POSTs", "solves", "different answers", "different ids", "seconds", "a second"),
    )
    for name, graph, fraction in (("at the plain peak", step(300, 2), 1.0), ("at half of it", step(300, 3), 0.5)):
        inner = folder / name.replace(" ", "-")
        inner.mkdir()
        processes = Processes(inner, workers=2)
        processes.serve()
        problem = Problem(graph, budget_at(graph, fraction))
        body = json.dumps({"problem": problem.to_json(), "time_limit_s": 10, "max_gap": 0.0}).encode()
        begun = time.perf_counter()
        async with client(processes.port, 1000) as http:
            found = await asyncio.gather(*(ask(http, body, f"same{i}") for i in range(options.identical)))
            seconds = time.perf_counter() - begun
        async with client(processes.port) as http:  # the server may have closed idle connections of the crowd
            metrics = (await http.get("/metrics")).text
        processes.close()
        for data in found:
            judged(problem, data)
        rows = [row for row in metrics.splitlines() if row.startswith("remat_solve_seconds_count")]
        solved = sum(float(row.rsplit(" ", 1)[1]) for row in rows)
        own = ("id", "cache", "seconds", "message", "limit")
        different = {json.dumps({k: v for k, v in data.items() if k not in own}) for data in found}
        ids = {data["id"] for data in found}
        report.add(
            name, len(found), f"{solved:g}", len(different), len(ids), f"{seconds:.1f}", f"{len(found) / seconds:.0f}"
        )
        if solved != 1 or len(different) != 1 or len(ids) != len(found):
            report.show(None)
            raise SystemExit(1)
    return report


async def distinct(folder: Path, options: argparse.Namespace) -> Report:
    """Distinct small problems, undisturbed."""
    processes = Processes(folder, workers=2)
    processes.serve()
    count, seconds = await many(processes.port, options.distinct, 40, 10_000)
    processes.close()
    report = Report("Distinct problems", ("problems", "kills", "seconds", "a second", "lost", "wrong"))
    report.add(count, 0, f"{seconds:.1f}", f"{count / seconds:.1f}", 0, 0)
    return report


async def killed(folder: Path, options: argparse.Namespace) -> Report:
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
    report = Report(
        "Distinct problems while the server is killed", ("problems", "kills", "seconds", "a second", "lost", "wrong")
    )
    report.add(count, kills, f"{seconds:.1f}", f"{count / seconds:.1f}", 0, 0)
    return report


def main() -> None:
    """Run the scenarios named, or all but those of a cluster."""
    scenarios = {f.__name__: f for f in (hits, identical, distinct, killed, scaling, cluster, depth)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("scenario", nargs="*", choices=[*scenarios, []], default=[])
    parser.add_argument("--out", type=Path, help="append the tables to this file, as Markdown")
    parser.add_argument("--ops", type=int, nargs="+", default=[300, 3000, 30000])
    parser.add_argument("--times", type=int, default=1000, help="requests at 300 ops; fewer at more")
    parser.add_argument("--identical", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between kills")
    parser.add_argument("--jobs", type=int, default=10_000, help="problems of `cluster`; a tenth of them for `scaling`")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.7], help="fractions, of `scaling`")
    options = parser.parse_args()
    for name in options.scenario or ["hits", "identical", "distinct", "killed"]:
        with tempfile.TemporaryDirectory(prefix="remat-load-") as folder:
            asyncio.run(scenarios[name](Path(folder), options)).show(options.out)


if __name__ == "__main__":
    main()
