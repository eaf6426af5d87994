"""The service's side of solver children: starts them, reads their frames, ends those that don't end by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import psutil
import structlog

from ..clock import Clock
from ..settings import Settings
from .forkserver import LONGEST_FRAME

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_MEMORY_CHECK_S = 0.25
_START_S, _COMPILE_S = 60.0, 900.0
"""What a forkserver may take to start, and to compile every kernel: some 20 s, on a busy machine minutes."""

log = structlog.get_logger("remat_service.processes.supervisor")


def scrubbed_environment(settings: Settings) -> dict[str, str]:
    """What a solver child may know: where programs are, and how many threads to use; no setting, no secret."""
    found = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    # kernels are looked up by the processor that these may name, in the folder that they may name
    found |= {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    if "PYTHONPATH" in found:  # an empty entry, and a relative one, would lead into the working folder
        folders = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if os.path.isabs(folder))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    found |= dict.fromkeys(names, str(settings.solver_threads))
    # the last is for what children start in their turn
    return found | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


@dataclass
class Child:
    """A running solver child."""

    pid: int
    link: socket.socket
    died: asyncio.Event = field(default_factory=asyncio.Event)
    status: int | None = None

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams from it and to it."""
        return await asyncio.open_connection(sock=self.link, limit=1 << 20)

    def signal(self, number: int) -> None:
        """Signal the whole process group, unless it is known to be gone."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def resident_bytes(self) -> int:
        """Resident memory of the child and everything it started."""
        total = 0
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            for process in (leader, *leader.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
        return total


class Supervisor:
    """Keeps one forkserver alive and hands out children forked there.

    Attributes:
        ready: whether a forkserver has started, and with it every kernel of the solver; children can follow at once.
        tried: set once the first start has succeeded or failed.
    """

    def __init__(self, settings: Settings, start_limit_s: float = 60.0) -> None:
        self._settings, self._start_limit_s = settings, start_limit_s
        self._forkserver: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._spawning: dict[int, tuple[asyncio.Future[Child], socket.socket]] = {}
        self._orders = itertools.count(1)
        self._children: dict[int, Child] = {}
        self._starting = asyncio.Lock()
        self.ready = False
        self.tried = asyncio.Event()

    async def warm(self) -> None:
        """Start the forkserver before the first child is wanted."""
        try:
            async with self._starting:
                if self._forkserver is None:
                    await self._start()
        finally:
            self.tried.set()

    async def start_child(self, time_limit_s: float) -> Child:
        """A new child, waiting for its job; started again from a fresh forkserver if the old one has died."""
        try:
            return await self._spawn(time_limit_s)
        except (OSError, TimeoutError):
            return await self._spawn(time_limit_s)

    async def _spawn(self, time_limit_s: float) -> Child:
        async with self._starting:
            if self._forkserver is None or self._forkserver.poll() is not None or self._control is None:
                await self.close()
                await self._start()
            asked = self._forkserver
        try:
            async with asyncio.timeout(self._start_limit_s):
                return await self._ordered(time_limit_s)
        except (OSError, TimeoutError):
            async with self._starting:
                if self._forkserver is asked:  # else somebody else has replaced it already
                    await self.close()
            raise

    async def _ordered(self, time_limit_s: float) -> Child:
        assert self._control is not None
        mine, its = socket.socketpair()
        mine.setblocking(False)
        started: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        # processor time is a last resort: generous, for engines with several threads
        cpu_seconds = int(time_limit_s * 8 * max(1, self._settings.solver_threads) + 120)
        order = next(self._orders)
        self._spawning[order] = started, mine
        try:
            message = json.dumps({"order": order, "cpu_seconds": cpu_seconds}).encode()
            socket.send_fds(self._control, [message], [its.fileno()])
        except OSError:
            del self._spawning[order]
            mine.close()
            raise
        finally:
            its.close()
        return await started

    async def _start(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forkserver = subprocess.Popen(
            [sys.executable, "-P", "-m", "remat_service.processes.forkserver", str(its.fileno())],
            pass_fds=(its.fileno(),),
            stdin=subprocess.DEVNULL,
            env=scrubbed_environment(self._settings),
            start_new_session=True,
        )
        its.close()
        mine.setblocking(False)
        self._control = mine
        ready = await self._said(mine, _START_S)
        if "compiling" in ready:
            log.warning("compiling the solver's kernels, once for this installation; not ready before that is done")
            ready = await self._said(mine, _COMPILE_S)
        if not ready["confined"]:
            log.warning("this system has no seccomp filters: solver children run without one")
        if ready["landlock"] < 6:
            log.warning(
                "this kernel confines solver children less than Linux 6.12 does; see the page of threats",
                landlock=ready["landlock"],
            )
        self.ready = True
        self._listener = asyncio.create_task(self._listen(mine))

    async def _said(self, control: socket.socket, limit_s: float) -> dict[str, Any]:
        said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(control, 4096), limit_s)
        if not said:
            raise OSError("the forkserver of solver children did not start")
        message: dict[str, Any] = json.loads(said)
        return message

    async def _listen(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while message := await loop.sock_recv(control, 4096):
                self._receive(json.loads(message))
        except OSError:
            pass
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """The forkserver is gone: nobody waits any longer for a child of its, and those that run are killed."""
        for started, link in self._spawning.values():
            link.close()
            if not started.done():
                started.set_exception(OSError("the forkserver of solver children died"))
        self._spawning.clear()
        for child in list(self._children.values()):
            child.signal(signal.SIGKILL)
            self._died(child.pid, -signal.SIGKILL)

    def _receive(self, message: dict[str, Any]) -> None:
        if "started" in message:
            started, link = self._spawning.pop(message["order"])
            child = Child(message["started"], link)
            self._children[child.pid] = child
            if started.done():  # whoever asked has given up
                link.close()
            else:
                started.set_result(child)
        elif "ended" in message:
            self._died(message["ended"], message["status"])

    def _died(self, pid: int, status: int) -> None:
        child = self._children.pop(pid, None)
        if child is not None:
            child.status = status
            child.died.set()

    async def close(self) -> None:
        """End the forkserver and with it every child."""
        try:
            if self._listener is not None:
                self._listener.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._listener
                self._listener = None
        finally:
            self._abandon()
            if self._control is not None:
                self._control.close()
                self._control = None
        if self._forkserver is not None:
            forkserver, self._forkserver = self._forkserver, None
            try:
                await asyncio.to_thread(forkserver.wait, 5.0)
            except subprocess.TimeoutExpired:
                forkserver.kill()
                await asyncio.to_thread(forkserver.wait)


class ChildRun:
    """One job in one child: frames come out, and a watchdog outside it sees to the end.

    At the deadline the child is told to stop; then SIGTERM, then SIGKILL, each to its whole process group. Over the
    memory limit it is killed at once. `reason` says which it took: "deadline", "terminated", "killed", "memory".
    """

    def __init__(self, child: Child, settings: Settings, clock: Clock, time_limit_s: float) -> None:
        self.child, self._clock = child, clock
        self.reason: str | None = None
        self._settings = settings
        self._deadline = self._clock.monotonic() + time_limit_s + settings.cancel_after_s
        self._sending = asyncio.Lock()
        self._writer: asyncio.StreamWriter
        self._cancelled_at: float | None = None

    async def frames(self, job: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Send the job; yield every frame until the child has ended."""
        reader, self._writer = await self.child.connected()
        watchdog = asyncio.create_task(self._watch())
        try:
            await self._send(job)
            while True:
                try:
                    head = await reader.readexactly(4)
                    size = struct.unpack(">I", head)[0]
                    if size > LONGEST_FRAME:
                        break
                    yield json.loads(await reader.readexactly(size))
                except (asyncio.IncompleteReadError, OSError, ValueError):
                    break
        except OSError:
            pass  # gone before it took the job: its end says so
        finally:
            watchdog.cancel()
            self.child.signal(signal.SIGKILL)
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.child.died.wait(), 5.0)

    async def cancel(self) -> None:
        """Tell the child to stop; the watchdog sees to it."""
        if self._cancelled_at is None:
            self._cancelled_at = self._clock.monotonic()
            with contextlib.suppress(OSError):
                await self._send({"cancel": True})

    async def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        async with self._sending:
            self._writer.write(struct.pack(">I", len(body)) + body)
            await self._writer.drain()

    async def _watch(self) -> None:
        settings = self._settings
        while True:
            await asyncio.sleep(_MEMORY_CHECK_S)
            if await asyncio.to_thread(self.child.resident_bytes) > settings.solver_memory_bytes:
                self.reason = "memory"
                self.child.signal(signal.SIGKILL)
                return
            moment = self._clock.monotonic()
            if self._cancelled_at is None and moment > self._deadline:
                self.reason = "deadline"
                await self.cancel()
            if self._cancelled_at is None:
                continue
            late = moment - self._cancelled_at - settings.terminate_after_s
            if late > settings.kill_after_s:
                self.reason = "killed"
                self.child.signal(signal.SIGKILL)
                return
            if late > 0 and self.reason != "terminated":
                self.reason = "terminated"
                self.child.signal(signal.SIGTERM)
