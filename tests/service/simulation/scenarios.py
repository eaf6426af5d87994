"""Short runs that lead straight to where one promise could break, for the mutants that break it."""

from __future__ import annotations

import asyncio
from contextlib import closing

from .problems import METHODS, Known, problems
from .world import TENANTS, World

_RED, _BLUE = TENANTS
_LONG_S = 9.0
_AS_ASKED = {"method": "staged", "time_limit_s": 20.0, "max_gap": 0.0}


def scene(number: int, name: str) -> None:
    """Play one of these from a seed, and judge it.

    Raises:
        Broken, InvalidPlan: an invariant does not hold.
    """
    with closing(World(number, alone=False)) as world:
        globals()[name](world)
        world.run(world.settle(60.0))
        world.judge()


def takeover(world: World) -> None:
    """A server becomes so slow that another takes over what it works on, and it goes on."""
    _serve(world, 2)
    world.ask(_RED, _problem(0), **_AS_ASKED)
    _pass(world, 1.0)
    for process in world.processes:
        if any(row["worker"] == process.name for row in world.eye.solves().values()):
            process.line.slow_s, process.line.disturbed = 2.0, True
    _pass(world, 12.0)


def leases(world: World) -> None:
    """Two healthy servers, and solves that take several leases."""
    _serve(world, 2)
    for which in range(3):
        world.ask(_RED, _problem(which), **_AS_ASKED)
    _pass(world, 12.0)


def clocks(world: World) -> None:
    """The clock of one of two servers is an hour fast, and then it dies."""
    _serve(world, 2)
    fast = world.processes[0]
    fast.clock.skew_s, fast.line.disturbed = 3600.0, True
    for which in range(4):
        world.ask(_RED, _problem(which), **_AS_ASKED)
    _pass(world, 6.0)
    world.run(world.kill(fast))


def queues(world: World) -> None:
    """The clock of a server that is busy jumps by an hour, while requests wait that have a queue limit."""
    _serve(world, 1)
    for which in range(5):
        world.ask(_RED, _problem(which), **_AS_ASKED | {"queue_limit_s": 25.0})
    _pass(world, 1.0)
    world.processes[0].clock.skew_s, world.processes[0].line.disturbed = 3600.0, True
    _pass(world, 7.0)


def joins(world: World) -> None:
    """Clients join a solve while it ends, again and again."""
    _serve(world, 1, work_s=0.3)
    world.processes[0].line.slow_s = 0.02
    for _ in range(60):
        world.ask(_RED, _problem(0), world.dice.uniform(0.0, 12.0), force=True, **_AS_ASKED)
    _pass(world, 12.0)


def quotas(world: World) -> None:
    """A tenant asks for more than it may have in the queue."""
    _serve(world, 2)
    world.run(world.limit(_RED, most_queued=2))
    for which in range(6):
        world.ask(_RED, _problem(which), **_AS_ASKED)
    _pass(world, 1.0)


def leaving(world: World) -> None:
    """One of two clients who wait for the same queued solve gives up."""
    _serve(world, 1)
    for which in (0, 1, 2, 2):
        world.ask(_BLUE, _problem(which), **_AS_ASKED)
        _pass(world, 0.3)
    world.cancel(sorted(world.accepted)[2])
    _pass(world, 1.0)


def lies(world: World) -> None:
    """Solver children send a plan that is none."""
    _serve(world, 1)
    world.processes[0].children.manners += ["lies"] * 4
    world.ask(_RED, _problem(0), **_AS_ASKED | {"time_limit_s": 3.0})
    _pass(world, 5.0)


def retries(world: World) -> None:
    """The connection is lost after a request was written; its client asks again."""
    _serve(world, 1)
    line = world.processes[0].line
    line.faults, line.disturbed = ["lost after the commit"], True
    world.ask(_RED, _problem(0), **_AS_ASKED)
    _pass(world, 5.0)


def tenants(world: World) -> None:
    """A tenant asks for the answer of another."""
    _serve(world, 1, work_s=0.5)
    world.ask(_RED, _problem(0), **_AS_ASKED)
    _pass(world, 5.0)
    world.peek(next(iter(world.accepted)))
    _pass(world, 1.0)


def effort(world: World) -> None:
    """A solve has several rounds: its children crash."""
    _serve(world, 1, work_s=2.0)
    world.processes[0].children.manners += ["crashes"] * 2
    world.ask(_RED, _problem(1), **_AS_ASKED)
    _pass(world, 10.0)


def shares(world: World) -> None:
    """A tenant asks for much, and urgently; another for one solve, at leisure."""
    _serve(world, 1, work_s=2.0)
    for known in problems():
        for method in METHODS:
            world.ask(_RED, known, **_AS_ASKED | {"method": method, "priority": 1})
    _pass(world, 0.5)
    world.ask(_BLUE, _problem(0), **_AS_ASKED | {"priority": -1})
    _pass(world, 20.0)


def _serve(world: World, servers: int, work_s: float = _LONG_S) -> None:
    for _ in range(servers):
        world.run(world.start())
        world.processes[-1].children.work_s = (work_s,)


def _pass(world: World, seconds: float) -> None:
    world.run(asyncio.sleep(seconds))


def _problem(which: int) -> Known:
    return problems()[which]
