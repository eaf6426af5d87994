"""Faults from a seed: the same seed is the same run, seeds hold, and what is broken on purpose is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import literal, select, update

from remat_ir import AnyPlan, InvalidPlan, Problem, Verdict
from remat_service.clock import Waits
from remat_service.identity import Keys
from remat_service.requests import completion, submit
from remat_service.solving.record import SolveRecord
from remat_service.storage.queue import Claimed, Queue, Turns, Waiting
from remat_service.storage.store import Store
from remat_service.storage.tables import Utc, requests, solves
from remat_service.storage.verifier import Verifier
from service.simulation.invariants import Broken
from service.simulation.machine import simulate
from service.simulation.problems import problems
from service.simulation.scenarios import scene
from service.simulation.world import World, callers
from tiers import first

_QUICK, _SCENES = 5, 10
_ONCE_FAILED = (62,)


def _trace(number: int) -> list[str]:
    with closing(World(number, alone=False)) as world:
        for _ in range(2):
            world.run(world.start())
        for which, known in enumerate(problems()):
            world.ask(("red", "blue")[which % 2], known, method="staged", time_limit_s=5.0, max_gap=0.0)
        world.run(asyncio.sleep(1.0))
        world.run(world.kill(world.processes[0]))
        world.run(world.settle())
        world.judge()
        return world.trace


def test_a_seed_is_a_run() -> None:
    """Every id and every moment again; another seed is another run."""
    once = _trace(7)
    assert len(once) == 2 * len(problems())
    assert _trace(7) == once
    assert _trace(8) != once


def test_servers_keep_a_tenants_quota_together() -> None:
    """Three servers with room for six, and a tenant that may have one running: never two, and all end."""
    with closing(World(1, alone=False)) as world:
        for _ in range(3):
            world.run(world.start())
        world.run(world.limit("red", most_running=1))
        for known in problems()[:4]:
            world.ask("red", known, method="staged", time_limit_s=5.0, max_gap=0.0)
        world.run(world.settle())
        world.judge()


def test_a_solve_that_broke_off_is_queued_again_at_once() -> None:
    """The disk is full while a solve ends and is given back: with room again it goes on, not when taken for dead."""
    with closing(World(1, alone=True)) as world:
        world.run(world.start())
        process = world.processes[0]
        process.children.work_s, process.line.disturbed = (0.5,), True
        world.ask("red", problems()[0], method="staged", time_limit_s=5.0, max_gap=0.0)
        world.run(asyncio.sleep(0.3))
        process.line.faults = ["disk full"] * 1000
        world.run(asyncio.sleep(1.0))
        (solve,) = world.eye.solves().values()
        assert (solve["state"], solve["attempt"]) == ("running", 1)
        process.line.faults.clear()
        world.run(asyncio.sleep(1.0))
        (solve,) = world.eye.solves().values()
        assert solve["attempt"] == 2
        world.run(world.settle())
        world.judge()


def test_seeds_hold() -> None:
    """No accepted request is lost, none solved past its fence, no answer wrong, quotas exact, and everything ends."""
    for number in (*range(_QUICK), *_ONCE_FAILED):
        simulate(number)


async def _unfenced(self: Queue, connection: Any, claimed: Claimed, values: dict[str, Any]) -> None:
    await connection.execute(update(solves).where(solves.c.id == claimed.id).values(**values))


async def _no_heartbeat(self: Queue, claimed: Claimed, spent_s: float) -> None:
    pass


async def _split_join(self: submit.Submission, keys: Keys) -> str | None:
    """The join in one transaction, the request in the next."""
    row = self._row(keys.graph, keys.digest, keys.method)
    async with self.context.database.write() as connection:
        solve_id = await self._join(connection, keys)
    if solve_id is None:
        return None
    async with self.context.database.write() as connection:
        await connection.execute(requests.insert().values(row | {"solve_id": solve_id, "cache": "joined"}))
    self.context.notifier.notify(solve_id)
    return str(row["id"])


async def _no_quota(*_: Any) -> None:
    pass


async def _end_for_all(context: Any, connection: Any, solve_id: str) -> None:
    await connection.execute(
        update(solves).where(solves.c.id == solve_id, solves.c.state == "queued").values(state="ended")
    )


async def _believe(self: Verifier, problem: Problem, plan: AnyPlan) -> Verdict:
    return Verdict(sum(problem.graph.op_cost_ns), problem.budget_bytes)


async def _no_retry(self: Any) -> None:
    return None


async def _any_tenant(self: Store, caller: Any, request_id: str) -> Any:
    async with self._database.read() as connection:
        owner = await connection.scalar(select(requests.c.tenant_id).where(requests.c.id == request_id))
    return await _ended(self, type(caller)(owner, caller.scope_id, caller.salt, caller.epoch), request_id)


_ended = Store.ended_request


def _most_urgent_of_all(self: Turns, each: Waiting) -> Any:
    """Red's are urgent; blue, the second tenant, asks at leisure."""
    return callers()["blue"].tenant_id == each.tenant_id, each.queued_s


def _spent_nothing(self: SolveRecord) -> float:
    self._began = None
    return 0.0


def _by_the_clock(self: Queue, ago_s: float = 0.0) -> Any:
    """A moment by the wall clock of the one that looks."""
    return literal(self._database.clock.now() - timedelta(seconds=ago_s), Utc())


_Break = Callable[[pytest.MonkeyPatch], None]
_STOLEN = "which works on it"
MUTANTS: dict[str, tuple[_Break, str, str]] = {
    "fence off": (lambda m: m.setattr(Queue, "settle", _unfenced), "takeover", "written past the fence"),
    "lease not renewed": (lambda m: m.setattr(Queue, "beat", _no_heartbeat), "leases", _STOLEN),
    "live workers taken for dead": (
        lambda m: m.setattr(Queue, "_lapsed", lambda self: solves.c.state == "running"), "leases", _STOLEN),
    "heartbeats by the wall clock": (lambda m: m.setattr(Queue, "_moment", _by_the_clock), "clocks", _STOLEN),
    "queue limits by the wall clock": (
        lambda m: m.setattr(Waits, "moment", lambda self: self._clock.now().timestamp()), "queues", "given up in the"),
    "join not atomic": (
        lambda m: m.setattr(submit.Submission, "_join_flight", _split_join), "joins", "clients wait"),
    "quota unchecked": (lambda m: m.setattr(submit, "check_quota", _no_quota), "quotas", "queued of 2"),
    "one who leaves ends it for all": (
        lambda m: m.setattr(completion, "end_if_unwanted", _end_for_all), "leaving", "1 clients wait"),
    "plans believed": (lambda m: m.setattr(Verifier, "verify", _believe), "lies", "first computed before"),
    "retries forgotten": (lambda m: m.setattr(submit.Submission, "_earlier", _no_retry), "retries", "1 clients wait"),
    "answers for any tenant": (
        lambda m: m.setattr(Store, "ended_request", _any_tenant), "tenants", "reads another's answer"),
    "priority before shares": (
        lambda m: m.setattr(Turns, "_key", _most_urgent_of_all), "shares", "more than their share"),
    "time not counted": (lambda m: m.setattr(SolveRecord, "end", _spent_nothing), "effort", "time was unspent"),
}  # fmt: skip
"""What is broken, the scene that leads there, and the invariant that must say so."""


def _play(name: str) -> None:
    for number in range(_SCENES):
        scene(number, name)


@pytest.mark.parametrize("name", first(4, MUTANTS))
def test_what_is_broken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant of the service breaks the invariant that it is about, in a scene that holds without it."""
    apply, which, what = MUTANTS[name]
    scene(0, which)
    apply(monkeypatch)
    with pytest.raises((Broken, InvalidPlan), match=what):
        _play(which)
