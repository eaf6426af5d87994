"""Servers, tenants and clients around one database, from the service's own parts: what a seed plays with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import structlog.testing
from pydantic import SecretStr
from sqlalchemy import update
from sqlalchemy.exc import DBAPIError

from remat_ir import Answer, Status, verify
from remat_service.context import Context
from remat_service.errors import Conflict, NotFound, RateLimited, Unavailable
from remat_service.identity import Caller, Retry
from remat_service.requests import read
from remat_service.requests.completion import cancel, housekeeping, poll
from remat_service.requests.parse import Ask
from remat_service.requests.submit import Submission
from remat_service.settings import Settings
from remat_service.solving.dispatch import Dispatcher, requeue_all
from remat_service.storage.database import Database, migrate
from remat_service.storage.tables import tenants
from remat_service.tenants.keys import add_tenant, caller_of

from .children import Children
from .disk import Line
from .invariants import Broken, Eye
from .loop import MachineClock, VirtualLoop
from .problems import Known, problems

TENANTS = ("red", "blue")
_REPLY_S = 30.0  # a client's patience with one server
_STALE_S = 3.0
_LONGEST_S = 900.0  # in which everything has ended


class Process:
    """One server: the service's own context, dispatcher, housekeeping and poller."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.world = name, world
        self.line = Line(world.dice, partial(world.eye.committed, name))
        self.clock = MachineClock(world.loop, world.dice)
        settings = world.settings
        database = Database(
            settings.database_url.get_secret_value(),
            self.clock,
            partial(self.line.connect, world.path),
            MachineClock(world.loop, world.dice),
            most_writers=1,  # the invariants are of what one writer has changed
        )
        database.engine.sync_engine.update_execution_options(compiled_cache=_COMPILED)
        self.children = Children(settings, world.dice)
        self.context = Context(settings, database, self.children)
        self.context.name = name
        self.context.notifier.relay = partial(world.relay, self)
        self.dispatcher = Dispatcher(self.context)
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to serve and to solve; where it is the only one, what a dead one left running is queued again."""
        if self.world.alone:
            await requeue_all(self.context)
        self.dispatcher.start()
        self._keepers = [asyncio.create_task(work(self.context)) for work in (housekeeping, poll)]

    async def stop(self) -> None:
        """As on SIGTERM."""
        self.context.leave()
        for keeper in self._keepers:
            keeper.cancel()
        await self.dispatcher.stop()
        with contextlib.suppress(DBAPIError):
            await self.context.write_behind.close()
        self.kill()

    def kill(self) -> None:
        """Nothing of it is heard any more: no statement, no note, no child."""
        self.line.kill()
        self.children.kill()
        self.context.notifier.relay = None


class World:
    """One run of a seed.

    Attributes:
        alone: one server on SQLite; else several that share the database, and take over from silent ones.
        processes: the servers that live.
        accepted: requests that a client holds an id of, with what they ask and for whom; `given`: their answers.
    """

    def __init__(self, seed: int, alone: bool) -> None:
        self.dice, self.alone = Random(seed), alone
        self._logs = structlog.testing.capture_logs()
        self.logs = self._logs.__enter__()
        self.loop = VirtualLoop(self.dice)
        self._unheard: list[str] = []
        self.loop.set_exception_handler(lambda _, found: self._unheard.append(repr(found.get("exception") or found)))
        self._folder = tempfile.TemporaryDirectory(prefix="remat-simulation-", dir=_memory())
        self.path = f"{self._folder.name}/s.sqlite"
        shutil.copy(_template()[0], self.path)
        self.settings = Settings(
            database_url=SecretStr(f"sqlite:///{self.path}"), seal_key=SecretStr("a key of forty characters for seals"),
            workers=2, heartbeat_s=0.5, stale_after_s=_STALE_S, most_attempts=50, most_time_limit_s=30.0,
        )  # fmt: skip
        self.eye = Eye(self.path, self._healthy, self.loop.time, _STALE_S)
        self.callers: dict[str, Caller] = callers()
        self.processes: list[Process] = []
        self._all: list[Process] = []
        self.accepted: dict[str, tuple[str, Known, Ask]] = {}
        self.given: dict[str, Answer] = {}
        self.refused = self.started = self._keys = 0
        self._clients: set[asyncio.Task[None]] = set()
        self.trace: list[str] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Let something happen; then look at what has been found."""
        found = self.loop.run_until_complete(work)
        self.eye.check()
        if self._unheard:
            raise Broken(f"a task has failed and nobody was told: {self._unheard[0]}")
        for client in [task for task in self._clients if task.done()]:
            self._clients.discard(client)
            client.result()
        return found

    async def start(self) -> None:
        """One server more."""
        self.started += 1
        process = Process(self, f"server-{self.started}")
        self.processes.append(process)
        self._all.append(process)
        await process.start()

    async def kill(self, process: Process) -> None:
        """A server dies."""
        self.processes.remove(process)
        process.kill()

    async def stop(self, process: Process) -> None:
        """A server is stopped."""
        self.processes.remove(process)
        await process.stop()

    async def limit(self, tenant: str, **limits: int | None) -> None:
        """Quotas of a tenant, from here on; what is there already stays."""
        tenant_id = self.callers[tenant].tenant_id
        database = Database(f"sqlite:///{self.path}", connect=partial(Line(self.dice, lambda: None).connect, self.path))
        async with database.write() as connection:
            await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(**limits))
        await database.close()
        for name, held in (("most_queued", self.eye.most_queued), ("most_running", self.eye.most_running)):
            if limits.get(name) is not None:
                held[tenant_id] = int(limits[name] or 0)

    def ask(self, tenant: str, known: Known, after_s: float = 0.0, **limits: Any) -> None:
        """A client asks, and asks again where a server does not answer, until it has its answer."""
        self._keys += 1
        body = hashlib.sha256(repr((known.problem, sorted(limits.items()))).encode()).digest()
        ask = Ask(known.problem, body=body, **limits)
        retry = Retry(f"key-{self._keys}", body.hex())
        self._client(self._asks(tenant, known, ask, retry, after_s))

    def cancel(self, request_id: str) -> None:
        """A client gives a request up."""
        self._client(self._cancels(self.callers[self.accepted[request_id][0]], request_id))

    def peek(self, request_id: str) -> None:
        """The other tenant asks for it."""
        tenant = next(name for name in TENANTS if name != self.accepted[request_id][0])
        self._client(self._peeks(self.callers[tenant], request_id))

    def relay(self, sender: Process, keys: tuple[str, ...]) -> None:
        """Notes to the other servers: late, twice, or never."""
        for process in self.processes:
            if process is not sender:
                for _ in range(self.dice.choice((0, 1, 1, 1, 1, 2))):
                    self.loop.call_later(self.dice.uniform(0.0, 0.05), process.context.notifier.notify_here, *keys)

    async def settle(self, longest_s: float = _LONGEST_S) -> None:
        """Faults are over, and there is a server: everything ends, and every answer is right."""
        for process in self.processes:
            process.line.faults.clear()
            process.line.slow_s, process.clock.skew_s = 0.0, 0.0
            process.children.manners.clear()
        if not self.processes:
            await self.start()
        until = self.loop.time() + longest_s
        while self.loop.time() < until and self.eye.broken is None:
            await asyncio.sleep(1.0)
            if all(task.done() for task in self._clients) and self._all_ended():
                break

    def judge(self) -> None:
        """What must hold in the end.

        Raises:
            Broken: it does not.
        """
        waiting = sum(not task.done() for task in self._clients)
        unfinished = [row["id"] for row in self.eye.solves().values() if row["state"] != "ended"]
        if waiting or unfinished:
            raise Broken(f"{waiting} clients wait and solves {unfinished} have not ended")
        stored = self.eye.requests()
        for request_id in self.accepted:
            if request_id not in self.given and not (request_id in stored and stored[request_id]["ended"]):
                raise Broken(f"the accepted request {request_id} is lost")
        if any(process.children.alive for process in self.processes):
            raise Broken("solver children are left")

    def close(self) -> None:
        """End the run: whatever still waits is dropped."""
        self.loop.run_until_complete(self._end())
        for _ in range(20):
            left = asyncio.all_tasks(self.loop)
            if not left:
                break
            for task in left:
                task.cancel()
            done, _ = self.loop.run_until_complete(asyncio.wait(left, timeout=30.0))
            for task in done:
                _heard(task)
        self.eye.close()
        self.loop.close()
        self._logs.__exit__(None, None, None)
        self._folder.cleanup()

    async def _end(self) -> None:
        for process in self._all:
            process.kill()
            process.line.over = True

    def _healthy(self, name: str) -> bool:
        return any(process.name == name and not process.line.disturbed for process in self.processes)

    def _all_ended(self) -> bool:
        return all(row["state"] == "ended" for row in self.eye.solves().values()) and not any(
            process.children.alive for process in self.processes
        )

    def _client(self, work: Coroutine[Any, Any, Any]) -> None:
        self._clients.add(self.loop.create_task(work))

    async def _reach(self, work: Callable[[Context], Coroutine[Any, Any, Any]]) -> Any:
        """The reply of some server; one that is silent or fails is left for another."""
        while True:
            if self.processes:
                process = self.dice.choice(self.processes)
                task = asyncio.create_task(work(process.context))
                done, _ = await asyncio.wait([task], timeout=_REPLY_S)
                task.add_done_callback(_heard)  # where its client has gone on
                with contextlib.suppress(DBAPIError, Unavailable):
                    if done:
                        return task.result()
            await asyncio.sleep(0.5)

    async def _asks(self, tenant: str, known: Known, ask: Ask, retry: Retry, after_s: float) -> None:
        caller = self.callers[tenant]
        await asyncio.sleep(after_s)
        begun = self.loop.time()
        try:
            request_id, text = await self._reach(lambda context: _post(context, caller, ask, retry))
        except (RateLimited, Conflict):
            self.refused += 1
            return
        self.trace.append(f"{self.loop.time():.6f} {request_id} taken")
        self.accepted[request_id] = tenant, known, ask
        while text is None:
            text = await self._reach(lambda context: _get(context, caller, request_id))
        self._judge(request_id, json.loads(text), self.loop.time() - begun)

    async def _cancels(self, caller: Caller, request_id: str) -> None:
        try:
            await self._reach(lambda context: cancel(context, caller, request_id))
        except NotFound as error:  # a crash may lose the row of an answer from memory, which its client has
            if request_id not in self.given:
                raise Broken(f"the accepted request {request_id} is not found") from error

    async def _peeks(self, caller: Caller, request_id: str) -> None:
        with contextlib.suppress(NotFound):
            await self._reach(lambda context: _get(context, caller, request_id))
            raise Broken("a tenant reads another's answer")

    def _judge(self, request_id: str, data: dict[str, Any], after_s: float) -> None:
        """An answer is right for what was asked."""
        _, known, ask = self.accepted[request_id]
        self.trace.append(f"{self.loop.time():.6f} {request_id} {data['status']} {data['cost_ns']} {data['limit']}")
        answer, best = Answer.from_json(data), known.best
        self.given[request_id] = answer
        name = f"the answer {answer.status.value} of {request_id}"
        if answer.plan is not None:
            verify(known.problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        if (answer.plan is None) != (answer.cost_ns is None):
            raise Broken(f"{name} has a cost without a plan")
        if answer.status is Status.INFEASIBLE and best.status is not Status.INFEASIBLE:
            raise Broken(f"{name} says that no plan fits")
        if answer.status is Status.OPTIMAL and answer.cost_ns != best.cost_ns:
            raise Broken(f"{name} is not optimal")
        if answer.bound_ns is not None and best.cost_ns is not None and answer.bound_ns > best.cost_ns:
            raise Broken(f"{name} has a bound above the optimum")
        if answer.status in (Status.QUEUED, Status.RUNNING):
            raise Broken(f"{name} is no end")
        if answer.message.startswith("The queue limit") and after_s <= (ask.queue_limit_s or 0.0):
            raise Broken(f"{name}: given up in the queue after {after_s:g} s of {ask.queue_limit_s}")
        faulty = any(process.children.misbehaved for process in self._all)
        if answer.status is Status.FAILED and not faulty:
            raise Broken(f"{name} failed: {answer.message}")
        settled = answer.status in (Status.OPTIMAL, Status.INFEASIBLE)
        if answer.limit is None and ask.method == "staged" and not settled and not faulty:
            raise Broken(f"{name} has ended without a reason")


async def _post(context: Context, caller: Caller, ask: Ask, retry: Retry) -> tuple[str, bytes | None]:
    async with context.locks.of(caller.tenant_id + retry.body_hash):
        held = await context.response_cache.get(caller, ask.body, retry)
        if held is not None:
            return json.loads(held)["id"], held
        taken = await Submission(context, caller, ask, retry).take()
        return taken.id, taken.answer


async def _get(context: Context, caller: Caller, request_id: str) -> bytes | None:
    text, ended = await read.answer(context, caller, request_id, context.clock.monotonic() + 5.0)
    return text if ended else None


def _heard(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class _Compiled(dict[Any, Any]):
    """Compiled statements, for the engines of all processes: of the key the dialect, each engine's own, is left out."""

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        """The compiled statement."""
        return super().get(key[1:], default)

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        super().__setitem__(key[1:], compiled)


_COMPILED = _Compiled()


def callers() -> dict[str, Caller]:
    """Each tenant as a caller, by its name."""
    return dict(_template()[1])


@cache
def _template() -> tuple[Path, dict[str, Caller], tempfile.TemporaryDirectory[str]]:
    """A database with its schema and tenants, made once, and the folder that it is in."""
    folder = tempfile.TemporaryDirectory(prefix="remat-simulation-", dir=_memory())
    path = Path(folder.name) / "template.sqlite"
    made = asyncio.run(_make(path))
    problems()
    return path, made, folder


async def _make(path: Path) -> dict[str, Caller]:
    database = Database(f"sqlite:///{path}")
    await migrate(database)
    async with database.write() as connection:
        found = {name: await caller_of(connection, await add_tenant(connection, name)) for name in TENANTS}
    await database.close()
    return found
