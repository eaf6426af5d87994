"""Solver children of a simulated process: they talk as real ones do, and are slow, lie, hang, crash or grow by lot."""

from __future__ import annotations

import asyncio
import json
import signal
import struct
from collections.abc import Callable
from random import Random
from typing import Any, cast

from remat_ir import Problem
from remat_service.processes.supervisor import Child, Supervisor
from remat_service.settings import Settings

from . import problems

MANNERS = ("works", "lies", "crashes", "hangs", "grows", "babbles")


class Children(Supervisor):
    """Starts simulated children.

    Attributes:
        manners: of the next children, in order; after them, they work.
        work_s: how long a child works, in seconds, by lot.
        alive: those that run.
    """

    def __init__(self, settings: Settings, dice: Random) -> None:
        super().__init__(settings)
        self._dice = dice
        self.manners: list[str] = []
        self.work_s: tuple[float, ...] = (0.05, 0.5, 2.0, 9.0)
        self.alive: list[SimulatedChild] = []
        self.misbehaved = 0

    async def warm(self) -> None:
        """Nothing is started before it is wanted."""

    async def start_child(self, time_limit_s: float) -> Child:
        """A child that works, or has the next one of the manners."""
        await asyncio.sleep(self._dice.uniform(0.0, 0.05))
        manner = self.manners.pop(0) if self.manners else "works"
        self.misbehaved += manner != "works"
        child = SimulatedChild(manner, self._dice.choice(self.work_s), self.alive.remove)
        self.alive.append(child)
        return child

    def kill(self) -> None:
        """Their parent is dead, and so they are."""
        for child in list(self.alive):
            child.signal(signal.SIGKILL)

    async def close(self) -> None:
        """Every child ends."""
        self.kill()


class SimulatedChild(Child):
    """A child of one manner, whose work takes some seconds."""

    def __init__(self, manner: str, work_s: float, ended: Callable[[SimulatedChild], None]) -> None:
        super().__init__(0, cast(Any, None))
        self._manner, self._work_s, self._ended = manner, work_s, ended
        self._came = bytearray()
        self._cancelled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams from it and to it: it is its own writer."""
        self._out = asyncio.StreamReader(limit=1 << 20)
        return self._out, cast(asyncio.StreamWriter, self)

    def write(self, data: bytes) -> None:
        """A message to it: its job, or that it is to stop."""
        self._came += data
        while len(self._came) >= 4 and len(self._came) >= 4 + (size := struct.unpack(">I", self._came[:4])[0]):
            message = json.loads(self._came[4 : 4 + size])
            del self._came[: 4 + size]
            if message.get("cancel"):
                self._cancelled.set()
            elif self.status is None:
                self._task = asyncio.get_running_loop().create_task(self._work(message))

    async def drain(self) -> None:
        """What was written has arrived."""

    def close(self) -> None:
        """Nobody writes to it any longer."""

    def signal(self, number: int) -> None:
        """It ends, unless it hangs and is only asked to."""
        if number == signal.SIGKILL or self._manner != "hangs":
            self._end(-number)

    def resident_bytes(self) -> int:
        """Its memory."""
        return 1 << 50 if self._manner == "grows" else 1 << 20

    def _end(self, status: int) -> None:
        if self.status is not None:
            return
        self.status = status
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if hasattr(self, "_out"):
            self._out.feed_eof()
        self.died.set()
        self._ended(self)

    async def _work(self, job: dict[str, Any]) -> None:
        known = _known(job)
        if self._manner == "hangs" or self._manner == "grows":
            await asyncio.get_running_loop().create_future()
        if self._manner == "babbles":
            self._out.feed_data(struct.pack(">I", 5) + b"{nope")
            return self._end(1)
        if self._manner == "lies":
            for frame in problems.lies(known):
                self._send(frame)
        seconds, limit = self._work_s, None
        if seconds > job["time_limit_s"]:
            seconds, limit = job["time_limit_s"], "time"
        told = problems.frames(known, job["method"], seconds, limit)
        for frame in told[:-1]:
            await self._until(seconds / len(told))
            self._send(frame)
        if self._manner == "crashes":
            return self._end(-11)
        await self._until(seconds / len(told))
        cancelled = self._cancelled.is_set() and limit is None
        self._send(problems.frames(known, job["method"], seconds, "cancel")[-1] if cancelled else told[-1])
        await asyncio.sleep(0.001)
        return self._end(0)

    async def _until(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._cancelled.wait()
        except TimeoutError:
            pass

    def _send(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode()
        self._out.feed_data(struct.pack(">I", len(body)) + body)


def _known(job: dict[str, Any]) -> problems.Known:
    problem = Problem.from_json(job["problem"])
    return next(known for known in problems.problems() if known.problem == problem)
