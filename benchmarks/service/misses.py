"""Distinct problems that nobody has asked for before, as fast as they are taken in; none of them is solved.

Each answer has to be a 202, which the service gives once the solve is committed. The dispatch is held back: the tenant
may have no solve running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.harness.serve import Processes
from benchmarks.harness.table import Report
from benchmarks.service.crowd import cpu_seconds, step
from remat_ir import Problem, budget_at

_CONNECTIONS = 32
_COLUMNS = ("ops", "misses", "CPU ms a miss", "a second", "p50 ms", "p99 ms")


async def misses(folder: Path, options: argparse.Namespace) -> None:
    """Distinct problems over 32 connections to one server on SQLite, which queues each and solves none."""
    with Report("Misses, queued and not solved", _COLUMNS, options.out) as report:
        for ops in options.miss_ops:
            inner = folder / str(ops)
            inner.mkdir()
            with Processes(inner, workers=1, most_queued=1_000_000) as processes:
                server = processes.serve()
                await _post(processes.port, _request(ops, 0), 202)
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
    return post_of(
        json.dumps({"problem": Problem(graph, budget_at(graph, 0.7)).to_json(), "time_limit_s": 60}).encode()
    )


def post_of(body: bytes) -> bytes:
    """A POST of a body, as it goes over the wire."""
    head = ["POST /v1/solves HTTP/1.1", "host: localhost", "content-type: application/json"]
    head.append(f"content-length: {len(body)}")
    return "\r\n".join((*head, "\r\n")).encode() + body


async def load(port: int, posts: list[bytes], status: int) -> list[float]:
    """Seconds of each POST, one after another on each of 32 connections; all must be answered with a status."""
    left: Iterator[bytes] = iter(posts)
    found = await asyncio.gather(*(_connection(port, left, status) for _ in range(_CONNECTIONS)))
    return [seconds for each in found for seconds in each]


async def _connection(port: int, left: Iterator[bytes], status: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    for body in left:
        begun = time.perf_counter()
        await sent(reader, writer, body, status)
        times.append(time.perf_counter() - begun)
    writer.close()
    return times


async def _post(port: int, body: bytes, status: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await sent(reader, writer, body, status)
    writer.close()


async def sent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, status: int) -> None:
    """One request over an open connection, by hand: a client library would take more of the machine than the server."""
    writer.write(body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.split("content-length:", 1)[1].split("\r\n", 1)[0])
    answer = await reader.readexactly(length)
    if int(head.split(" ", 2)[1]) != status:
        raise SystemExit(f"not answered {status}: {head.splitlines()[0]} {answer[:300]!r}")
