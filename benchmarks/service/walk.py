"""The walk of a request through the service: how many modules it enters, and how often it changes from one to another.

`python -m benchmarks.service.walk [--names]` sends requests to the application in this process and counts the calls
that belong to each: those of its task, and of the threads and tasks that it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
from pydantic import SecretStr

from benchmarks.harness.table import Report
from benchmarks.service.crowd import JSON, step
from remat_ir import Graph, Problem, budget_at
from remat_service.settings import Settings
from remat_service.web.app import create_app

_WALK: ContextVar[Walk | None] = ContextVar("walk", default=None)


class Walk:
    """The modules that one request has entered, in order of their first call, and its changes of module."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.changes = 0
        self._last = ""

    def enter(self, module: str) -> None:
        """A call of a function of a module."""
        self.modules[module] = None
        self.changes += module != self._last
        self._last = module


def _profile(frame: FrameType, event: str, _: Any) -> None:
    walk = _WALK.get()
    name = str(frame.f_globals.get("__name__", ""))
    if walk is not None and event == "call" and name.startswith("remat_service."):
        walk.enter(name.removeprefix("remat_service."))


async def _walk(client: httpx2.AsyncClient, body: bytes, wait_s: int = 0) -> tuple[Walk, dict[str, Any]]:
    walk = Walk()

    async def send() -> httpx2.Response:
        _WALK.set(walk)
        return await client.post("/v1/solves", content=body, headers={**JSON, "Prefer": f"wait={wait_s}"})

    reply = await asyncio.create_task(send())
    data: dict[str, Any] = reply.json()
    return walk, data


def _body(graph: Graph, **more: object) -> bytes:
    problem = Problem(graph, budget_at(graph, 0.7))
    return json.dumps({"problem": problem.to_json(), "method": "greedy", "time_limit_s": 5, **more}).encode()


async def walks(folder: Path, ops: int) -> dict[str, tuple[Walk, dict[str, Any]]]:
    """A miss, the first hit in another process, a hit of another body about the same graph, and of the same body."""
    settings = Settings(database_url=SecretStr(f"sqlite:///{folder}/walk.sqlite"), workers=1, log_level="ERROR")
    graph, found = step(ops, 1), dict[str, tuple[Walk, dict[str, Any]]]()
    for again in (False, True):
        app = create_app(settings)
        transport = httpx2.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            if not again:
                found["a miss"] = await _walk(client, _body(graph))
                path = f"/v1/solves/{found['a miss'][1]['id']}"
                while (await client.get(path, params={"wait": 30})).status_code == 202:
                    pass
                continue
            found["the first hit of a problem"] = await _walk(client, _body(graph))
            found["a hit of a new body"] = await _walk(client, _body(graph, name="new"))
            found["a hit of a body seen before"] = await _walk(client, _body(graph))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=300)
    parser.add_argument("--names", action="store_true", help="print the modules too")
    parser.add_argument("--out", type=Path, help="append the table to this file, as Markdown")
    options = parser.parse_args()
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    with tempfile.TemporaryDirectory(prefix="remat-walk-") as folder:
        found = asyncio.run(walks(Path(folder), options.ops))
    sys.setprofile(None)
    with Report(
        "The walk of a request", ("request", "answered", "modules", "changes of module"), options.out
    ) as report:
        for name, (walk, data) in found.items():
            report.add(name, data["cache"], len(walk.modules), walk.changes)
    if options.names:
        for name, (walk, _) in found.items():
            print(f"{name}: {', '.join(walk.modules)}")


if __name__ == "__main__":
    main()
