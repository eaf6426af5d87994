"""A crowd of clients on a running service: what the load scenarios share."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import httpx2
import psutil

from remat_ir import Answer, Graph, Problem, budget_at, graph_of, verify

P = ParamSpec("P")
T = TypeVar("T")

JSON = {"Content-Type": "application/json"}
_CONNECTIONS = 32


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


def post_of(asked: dict[str, Any]) -> bytes:
    """A POST of what is asked, as it goes over the wire."""
    body = json.dumps(asked).encode()
    head = ["POST /v1/solves HTTP/1.1", "host: localhost", "content-type: application/json"]
    head.append(f"content-length: {len(body)}")
    return "\r\n".join((*head, "\r\n")).encode() + body


async def load(port: int, posts: list[bytes], status: int) -> list[float]:
    """Seconds of each POST, one after another on each of 32 connections; all must be answered with a status."""
    left: Iterator[bytes] = iter(posts)
    found = await asyncio.gather(*(one_after_another(port, left, status) for _ in range(_CONNECTIONS)))
    return [seconds for each in found for seconds in each]


async def one_after_another(port: int, left: Iterator[bytes], status: int) -> list[float]:
    """Seconds of each POST over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    for body in left:
        begun = time.perf_counter()
        await sent(reader, writer, body, status)
        times.append(time.perf_counter() - begun)
    writer.close()
    return times


async def sent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, status: int) -> None:
    """One request over an open connection, by hand: a client library would take more of the machine than the server."""
    writer.write(body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.split("content-length:", 1)[1].split("\r\n", 1)[0])
    answer = await reader.readexactly(length)
    if int(head.split(" ", 2)[1]) != status:
        raise SystemExit(f"not answered {status}: {head.splitlines()[0]} {answer[:300]!r}")
