"""A real service in a process of its own, and graphs to ask it about."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self

import httpx2
import pytest

from drawn import posed
from remat_ir import Answer, Chain, Graph, Join, Problem, graph_of, plain_peak, verify

SHORT = {"stale_after_s": 3, "heartbeat_s": 0.5}
"""Leases that a test can wait for."""


def as_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as variables of the environment."""
    return {f"REMAT_{name.upper()}": str(value) for name, value in settings.items()}


class Running:
    """A command of `remat-service` that has said that it is ready."""

    process: subprocess.Popen[str]

    def launch(self, log: Path, *arguments: str, program: Path | None, **settings: object) -> str:
        """Start it, with what it logs in a file of its folder: the line that says that it is ready."""
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "remat_service.cli", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | as_environment(settings) | of_program(program),
                cwd=log.parent,
            )
        line = self.process.stdout.readline()
        assert "ready" in line, line + log.read_text()[-3000:]
        return line

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


class Service(Running):
    """A running `remat-service serve` on a free port, of another program where its folder is named."""

    def __init__(
        self, folder: Path, database_url: str | None = None, program: Path | None = None, **settings: Any
    ) -> None:
        self.folder, self.program = folder, program
        self.database_url = database_url or f"sqlite:///{folder}/service.sqlite"
        self.settings = settings
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, on the same port as before if there was one, and wait for the ready line."""
        given = {"database_url": self.database_url, "log_level": "INFO", "notice_s": 0}
        given["look_up_s"] = 20  # a machine that is busy with other tests is slow
        log, command = self.folder / "service.log", ("serve", "--port", str(self.port))
        line = self.launch(log, *command, program=self.program, **given | self.settings)
        self.port = int(line.rsplit(":", 1)[1])
        self.http = httpx2.Client(base_url=self.url, timeout=60.0, trust_env=False)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        self.http.close()
        return super().stop(number)

    def post(self, problem: Problem, wait: float = 30.0, **more: Any) -> tuple[int, dict[str, Any]]:
        """POST a problem: status and body."""
        reply = self.http.post(
            "/v1/solves", json={"problem": problem.to_json(), **more}, headers={"Prefer": f"wait={wait:g}"}
        )
        return reply.status_code, reply.json()

    def get(self, solve_id: str, wait: float = 30.0) -> tuple[int, dict[str, Any]]:
        """Poll a solve: status and body."""
        reply = self.http.get(f"/v1/solves/{solve_id}", params={"wait": wait})
        return reply.status_code, reply.json()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, or the sample with the labels that are named behind it."""
        text = self.http.get("/metrics").text
        rows = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    def edit(self, statement: str, *values: object) -> int:
        """Change its SQLite file, as another process would: how many rows those were."""
        with closing(sqlite3.connect(self.folder / "service.sqlite", timeout=20)) as database, database:
            return database.execute(statement, values).rowcount

    def rows(self, query: str, *values: object) -> list[Any]:
        """What is in its SQLite file."""
        with closing(sqlite3.connect(self.folder / "service.sqlite", timeout=20)) as database:
            return database.execute(query, values).fetchall()


def peak_bytes(service: Service) -> int:
    """The most that was ever resident of its process."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


def of_program(folder: Path | None) -> dict[str, str]:
    """The environment in which the packages are those below a folder; the installed ones where there is none."""
    return (
        {} if folder is None else {"PYTHONPATH": os.pathsep.join(str(folder / part) for part in ("service", "solver"))}
    )


class Listener:
    """A server of a test's own on a free port; a context manager that ends it."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Worker(Running):
    """A running `remat-service worker`."""

    def __init__(
        self, folder: Path, url: str, *arguments: str, program: Path | None = None, **settings: object
    ) -> None:
        command = ("worker", "--workers", "1", *arguments)
        self.launch(folder / "worker.log", *command, program=program, database_url=url, **settings)


class Machines:
    """Servers and workers on one database, each in a folder of its own; what still runs is ended with the test."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url, self._all = folder, url, list[Service | Worker]()

    def server(self, program: Path | None = None) -> Service:
        """One server more, which solves nothing by itself."""
        folder = self._folder / f"server-{len(self._all)}"
        server = Service(folder, self._url, program, dispatcher="cluster", **SHORT)
        self._all.append(server)
        return server

    def worker(self, *arguments: str, program: Path | None = None, **settings: object) -> Worker:
        """One worker more, with one slot."""
        folder = self._folder / f"worker-{len(self._all)}"
        worker = Worker(folder, self._url, *arguments, program=program, **SHORT | settings)
        self._all.append(worker)
        return worker

    def end(self) -> None:
        """Continue and end all of them."""
        for each in self._all:
            if each.process.poll() is None:
                each.process.send_signal(signal.SIGCONT)
                each.stop(signal.SIGKILL)


_CALLS = """
import contextlib, io, json, os, sys
from remat_service.cli import main
ended = []
for command, settings in json.load(sys.stdin):
    os.environ.update(settings)
    sys.argv, said, printed = ["remat-service", *command], io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
            code = main() or 0
        except SystemExit as error:
            code = error.code or 0
    ended.append((code, said.getvalue(), printed.getvalue()))
    for name in settings:
        del os.environ[name]
print(json.dumps(ended))
"""


def commands_ended(folder: Path, calls: list[tuple[list[str], dict[str, str]]]) -> list[tuple[int, str, str]]:
    """How commands end, each with settings: exit code, standard error, standard output; in one process for all."""
    asked = [(command, as_environment(given)) for command, given in calls]
    done = subprocess.run(
        [sys.executable, "-c", _CALLS], input=json.dumps(asked),
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(code, said, printed) for code, said, printed in json.loads(done.stdout.splitlines()[-1])]


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Service]:
    """A service that is stopped at the end."""
    service = Service(folder, **settings)
    try:
        yield service
    finally:
        service.stop()


def served(scope: Literal["module", "function"] = "module", **settings: Any) -> Any:
    """A fixture: a service for the tests of one module, or for one test."""

    @pytest.fixture(scope=scope)
    def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
        with serving(tmp_path_factory.mktemp("served"), **settings) as found:
            yield found

    return running


def command(url: str, *arguments: str, **more: str) -> Any:
    """How `remat-service` ends on a database, run in this process."""
    from typer.testing import CliRunner

    from remat_service.cli import app

    return CliRunner().invoke(app, list(arguments), env={"REMAT_DATABASE_URL": url, **more})


def started(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """How `remat-service` ends in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "remat_service.cli", *arguments],
        env=os.environ | as_environment(settings), cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def training_graph(layers: int = 4, cost: int = 100, size: int = 1000, fixed: int = 0) -> Graph:
    """A chain of layers and its backward pass: op i reads op i−1; the gradient of layer i reads activation i−1."""
    costs = [cost + i for i in range(layers)] + [2 * cost + i for i in range(layers)]
    sizes = [size] * layers + [size // 2] * layers
    inputs: list[list[int]] = [[]] + [[i - 1] for i in range(1, layers)]
    for back in range(layers):
        layer = layers - 1 - back
        before = [layers + back - 1] if back else [layers - 1]
        inputs.append(sorted({*before, *([layer - 1] if layer else [])}))
    return graph_of(costs, sizes, inputs, backward_from=layers, fixed_bytes=fixed)


def even_chain(stages: int, size: int) -> Chain:
    """A chain of equal stages; what a stage keeps for its backward step is three of its activations."""
    return Chain(
        forward_ns=(1000,) * stages,
        backward_ns=(2000,) * stages,
        forward_workspace_bytes=(0,) * stages,
        backward_workspace_bytes=(0,) * stages,
        tape_bytes=(3 * size,) * stages,
        activation_bytes=(size,) * (stages + 1),
        gradient_bytes=(size,) * (stages + 1),
    )


def at_peak(subject: Graph | Chain | Join) -> Problem:
    """The problem whose best plan is the plain one."""
    return Problem(subject, plain_peak(subject))


def small(i: int) -> Problem:
    """One of many that are solved at once."""
    return at_peak(training_graph(5, cost=1000 + i))


def checked(problem: Problem, data: dict[str, Any]) -> Answer:
    """An answer with a plan that the verifier passes on the problem as it was sent."""
    answer = Answer.from_json(data)
    assert answer.plan is not None, data
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    assert answer.budget_bytes == problem.budget_bytes
    assert answer.bound_ns <= answer.cost_ns
    return answer


def eventually(condition: Any, seconds: float = 20.0, every: float = 0.05) -> Any:
    """The first true value of a condition, or a failure that says how long it was waited for."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s")


def all_answered(service: Service, posted: dict[str, Problem], seconds: float = 60) -> None:
    """Every request is answered within the time, and rightly."""
    until = time.monotonic() + seconds
    for request_id, problem in posted.items():
        found = eventually(
            lambda request_id=request_id: (got := service.get(request_id, 5))[0] == 200 and got,
            max(5.0, until - time.monotonic()),
        )
        checked(problem, found[1])


def example(name: str) -> Any:
    """An example of the OpenAPI document."""
    import remat_service

    return json.loads((Path(remat_service.__file__).parent / "web" / "examples.json").read_text())[name]


def hard_graph(layers: int = 30, seed: int = 1) -> Graph:
    """A forward pass with random skips and sizes, and its backward pass: no method proves it optimal in seconds."""
    dice = random.Random(seed)
    inputs: list[list[int]] = [[]]
    inputs += [sorted({op - 1, *dice.sample(range(op), min(op, dice.choice((0, 1, 1, 2))))}) for op in range(1, layers)]
    costs = [dice.randrange(100, 10_000) for _ in range(layers)]
    sizes = [dice.randrange(1_000, 100_000) for _ in range(layers)]
    for back in range(layers):
        layer = layers - 1 - back
        before = [layers + back - 1] if back else [layers - 1]
        inputs.append(sorted({*before, layer, *inputs[layer]}))
        costs.append(2 * costs[layer])
        sizes.append(sizes[layer])
    return graph_of(costs, sizes, inputs, backward_from=layers)


def open_problem(seed: int) -> Problem:
    """A problem that no method settles in a minute."""
    return posed(hard_graph(60, seed), 0.4)


def long_solve(service: Service, seed: int, seconds: float = 90) -> tuple[Problem, dict[str, Any]]:
    """A solve of many seconds with an incumbent that has been told: the problem, and the answer so far."""
    problem = open_problem(seed)
    _, greedy = service.post(problem, method="greedy", time_limit_s=20, max_gap=0)
    _, posted = service.post(problem, wait=0, method="staged", time_limit_s=seconds, max_gap=0, start=greedy["id"])
    posted = eventually(lambda: (found := service.get(posted["id"], 0)[1])["cost_ns"] and found, 40)
    return problem, posted


def given_up(service: Service, problem: Problem, posted: dict[str, Any]) -> None:
    """Cancel a solve: it ends with a plan that is no worse than what it had told before."""
    reply = service.http.post(f"/v1/solves/{posted['id']}/cancel")
    assert reply.status_code == 200, reply.text
    assert checked(problem, reply.json()).cost_ns <= posted["cost_ns"]
