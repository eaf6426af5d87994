"""A crowd of clients on a running service: what the load scenarios share."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import httpx2
import psutil

from remat_ir import Answer, Graph, Problem, budget_at, graph_of, verify

P = ParamSpec("P")
T = TypeVar("T")

JSON = {"Content-Type": "application/json"}


async def in_thread(work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """A blocking call in a thread; it is waited for also by who is cancelled, who then can end what it started."""
    call = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **more))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


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


_STARTS = 10
"""How often a process is started that ends before it is ready."""


class Processes:
    """What a scenario has started, ended with the block that it is used in."""

    def __init__(self, folder: Path, url: str | None = None, **settings: Any) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "REMAT_DATABASE_URL": url or f"sqlite:///{folder}/load.sqlite",
            "REMAT_SEAL_KEY": secrets.token_hex(32),
            "REMAT_LOG_LEVEL": "WARNING",
            "REMAT_NOTICE_S": "0",
            **{"REMAT_" + name.upper(): str(value) for name, value in settings.items()},
        }
        self.log = (folder / "log").open("a")
        self.running: list[subprocess.Popen[str]] = []
        self.port = 0

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.terminate()
        for process in list(self.running):
            try:
                self.end(process)
            except subprocess.TimeoutExpired:
                self.end(process, signal.SIGKILL)
        self.log.close()

    def start(self, *arguments: str, ready: str = "ready") -> subprocess.Popen[str]:
        """A `remat-service` process, once it says that it is ready.

        While its database is away it ends with a sentence; then it is started again, as whatever supervises it would.
        """
        for _ in range(_STARTS):
            process = subprocess.Popen(
                [sys.executable, "-m", "remat_service.cli", *arguments],
                env=self.environment, stdout=subprocess.PIPE, stderr=self.log, text=True,
            )  # fmt: skip
            self.running.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
            if ready in line:
                break
            self.end(process)
            time.sleep(1.0)
        else:
            raise SystemExit(f"{arguments} did not start; see {self.folder}/log")
        found = re.search(r"http://[^:]+:(\d+)", line)
        if found:
            self.port = int(found.group(1))
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


def verified(problem: Problem, data: dict[str, Any]) -> None:
    """An answer is an optimum or a plan that the verifier passes; else the run has failed."""
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


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """What a process has used up to now, its children not counted."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


async def timed(work: Callable[[], Awaitable[httpx2.Response]], times: int) -> list[float]:
    """Seconds of each of `times` calls, one after another."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        reply = await work()
        found.append(time.perf_counter() - begun)
        assert reply.status_code == 200, reply.text[:300]
    return sorted(found)


async def many(port: int, count: int, ops: int, seed: int, fraction: float = 1.0) -> tuple[int, float]:
    """Distinct small problems, each verified: how many, in how many seconds."""
    graphs = [step(ops, seed + i) for i in range(count)]
    problems = [Problem(graph, budget_at(graph, fraction)) for graph in graphs]
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
        verified(problem, data)
    return len(found), seconds
