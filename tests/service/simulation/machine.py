"""What may happen, in any order: hypothesis draws it from a seed, and shortens what fails."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, Phase, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from .children import MANNERS
from .disk import FAULTS
from .problems import METHODS, problems
from .world import TENANTS, World

_STEPS = 25
_TENANT, _METHOD = st.sampled_from(TENANTS), st.sampled_from(METHODS)


class Simulation(RuleBasedStateMachine):
    """The rules; an invariant that breaks is raised by the step after which it was seen."""

    world: World

    @initialize(
        number=st.integers(0, 2**32 - 1),
        servers=st.integers(1, 3),
        quota=st.sampled_from((None, 1, 2)),
        asks=st.lists(st.tuples(_TENANT, st.integers(0, 6), _METHOD), min_size=1, max_size=3),
    )
    def begin(self, number: int, servers: int, quota: int | None, asks: list[tuple[str, int, str]]) -> None:
        """Servers start, one tenant has quotas, and clients ask: hypothesis may leave every other `ask` out."""
        assume(number)  # the first run that hypothesis tries is the simplest, and the same for every seed
        self.world = World(number, alone=servers == 1)
        for _ in range(servers):
            self.world.run(self.world.start())
        if quota is not None:
            self.world.run(self.world.limit(TENANTS[0], most_queued=quota + 1, most_running=quota))
        for tenant, which, method in asks:
            self.world.ask(tenant, problems()[which], method=method, time_limit_s=3.0, max_gap=0.0)

    @rule(
        tenant=_TENANT, which=st.integers(0, 6), method=_METHOD,
        seconds=st.sampled_from((0.3, 3.0, 8.0)), gap=st.sampled_from((0.0, 0.9)), priority=st.integers(-1, 1),
        queue_limit_s=st.sampled_from((None, 2.0, 20.0)), force=st.sampled_from((False, False, True)),
    )  # fmt: skip
    def ask(self, tenant: str, which: int, method: str, seconds: float, gap: float, **limits: Any) -> None:
        """A client asks for a plan."""
        self.world.ask(tenant, problems()[which], method=method, time_limit_s=seconds, max_gap=gap, **limits)
        self._pass(0.01)

    @rule(
        tenant=_TENANT, which=st.integers(0, 6), method=_METHOD,
        several=st.integers(2, 6), seconds=st.sampled_from((0.5, 3.0)),
    )  # fmt: skip
    def crowd(self, tenant: str, which: int, method: str, several: int, seconds: float) -> None:
        """Clients ask the same within some seconds: they join a solve at any moment of it, its end too."""
        for _ in range(several):
            after_s = self.world.dice.uniform(0.0, seconds)
            limits = {"method": method, "time_limit_s": 3.0, "max_gap": 0.0}
            self.world.ask(tenant, problems()[which], after_s, **limits)
        self._pass(seconds)

    @rule(seconds=st.sampled_from((0.01, 0.1, 1.0, 6.0)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self._pass(seconds)

    @precondition(lambda self: self.world.accepted)
    @rule(which=st.integers(0, 99), theirs=st.booleans())
    def look_or_leave(self, which: int, theirs: bool) -> None:
        """A request is cancelled, or asked for by a tenant that it does not belong to."""
        ids = sorted(self.world.accepted)
        (self.world.peek if theirs else self.world.cancel)(ids[which % len(ids)])
        self._pass(0.05)

    @precondition(lambda self: self.world.processes)
    @rule(which=st.integers(0, 9), moment=st.floats(0.0, 0.1))
    def kill(self, which: int, moment: float) -> None:
        """A server dies, between any two of its statements."""
        self._pass(moment)
        self.world.run(self.world.kill(self._process(which)))

    @precondition(lambda self: self.world.processes)
    @rule(which=st.integers(0, 9))
    def stop(self, which: int) -> None:
        """A server is told to stop."""
        self.world.run(self.world.stop(self._process(which)))

    @precondition(lambda self: len(self.world.processes) < (1 if self.world.alone else 3))
    @rule()
    def start(self) -> None:
        """Another server starts."""
        self.world.run(self.world.start())

    @precondition(lambda self: self.world.processes)
    @rule(which=st.integers(0, 9), faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=3))
    def fail(self, which: int, faults: list[str]) -> None:
        """The next writes of a server meet these."""
        line = self._process(which).line
        line.faults, line.disturbed = line.faults + faults, True

    @precondition(lambda self: self.world.processes)
    @rule(which=st.integers(0, 9), manners=st.lists(st.sampled_from(MANNERS), min_size=1, max_size=3))
    def misbehave(self, which: int, manners: list[str]) -> None:
        """The next solver children of a server have these manners."""
        self._process(which).children.manners += manners

    @precondition(lambda self: self.world.processes)
    @rule(
        which=st.integers(0, 9),
        slow_s=st.sampled_from((0.0, 0.2, 2.0)),
        skew_s=st.sampled_from((-3600.0, -1.0, 0.0, 1.0, 3600.0)),
    )
    def disturb(self, which: int, slow_s: float, skew_s: float) -> None:
        """A server's statements and heartbeats become slow, and its clock jumps."""
        process = self._process(which)
        process.line.slow_s, process.clock.skew_s, process.line.disturbed = slow_s, skew_s, True
        self.world.eye.slowed |= slow_s > 0.0

    @precondition(lambda self: self.world.processes)
    @rule(which=st.integers(0, 9))
    def wake(self, which: int) -> None:
        """Everybody who waits at a server is woken, for nothing."""
        self._process(which).context.notifier.notify_all()
        self._pass(0.01)

    def teardown(self) -> None:
        """Faults end; so does everything, and rightly."""
        if not hasattr(self, "world"):
            return
        try:
            self.world.run(self.world.settle())
            self.world.judge()
        finally:
            self.world.close()

    def _pass(self, seconds: float) -> None:
        self.world.run(asyncio.sleep(seconds))

    def _process(self, which: int) -> Any:
        return self.world.processes[which % len(self.world.processes)]


def simulate(number: int, machine: type[Simulation] = Simulation, shrink: bool = True) -> None:
    """One seed: a run of steps drawn from it; where it fails, the shortest that hypothesis finds is printed.

    Raises:
        Broken: an invariant does not hold.
    """
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    run_state_machine_as_test(
        seed(number)(type(machine.__name__, (machine,), {"__module__": ""})),  # its source is not read again
        settings=settings(
            max_examples=1,
            stateful_step_count=_STEPS,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
