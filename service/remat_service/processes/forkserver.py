"""The forkserver of solver children, and what runs in each of them.

It is a small single-threaded process that has everything slow loaded, and forks.
A fork of it starts in milliseconds where a fresh interpreter takes hundreds. It holds numpy, the solver's Python and
its compiled kernels, but no engine, no secret, no database connection.
Each child leads its own process group, so that engines started inside it end with it. When a child ends in any way,
the rest of its group is killed before its id is given back, and its temporary folder removed; when the service ends in
any way, the control socket does, and every group is killed.

Control socket: the forkserver says `{"compiling": pid}` where kernels are missing, then `{"ready": pid}`. The service
sends one datagram a child, with the child's socket attached; the forkserver answers `{"started": pid, "order": n}`,
with the number that came in the order, and later `{"ended": pid, "status": n}`.

A child reads one job from its socket, solves it, and streams out every improvement as it comes.
Frames are a 4-byte big-endian length and JSON, as `multiprocessing.connection` writes them. In: one job, then perhaps
`{"cancel": true}`. Out: `progress` frames and one `answer` or `error`. When the socket ends, whoever started the child
is gone, and the child ends its process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from remat_ir import AnyPlan, InvalidData, InvalidPlan, Problem, Progress, read_plan
from remat_ir.proof import Proof, read_proof
from remat_solver import all_cached, load_for_forks, solve

from . import sandbox

LONGEST_FRAME = 1 << 30
_QUIET_S = 0.1  # bounds alone are sent no more often than this

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve forks until the control socket closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        # every kernel is there before the first fork and outside the sandbox; nothing below writes numba's cache
        if not all_cached():
            control.send(json.dumps({"compiling": os.getpid()}).encode())
        if not load_for_forks(stopped=lambda: bool(select.select([control], [], [], 0)[0])):
            return
    except (BrokenPipeError, ConnectionResetError):
        return
    confined = sandbox.enter()

    gc.collect()
    gc.freeze()
    alive: set[int] = set()
    scratch = tempfile.mkdtemp(prefix="remat-")
    try:
        said = {"ready": os.getpid(), "confined": confined, "landlock": sandbox.landlock()}
        control.send(json.dumps(said).encode())
        while True:
            waited: list[int] = [control.fileno(), wake_read]
            ready, _, _ = select.select(waited, [], [], 60.0)
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            _reap(control, alive, scratch)
            if control.fileno() in ready:
                order, fds, _, _ = socket.recv_fds(control, 4096, 1)
                if not order:
                    return
                asked = json.loads(order)
                pid = os.fork()
                if pid == 0:
                    _run_child(control, fds[0], asked, (wake_read, wake_write), scratch)
                os.close(fds[0])
                alive.add(pid)
                control.send(json.dumps({"started": pid, "order": asked["order"]}).encode())
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        for pid in alive:
            _kill_group(pid)
        shutil.rmtree(scratch, ignore_errors=True)


def _run_child(control: socket.socket, fd: int, order: dict[str, int], wake: tuple[int, int], scratch: str) -> None:
    code = 70
    try:
        os.setsid()
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(code)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        control.close()
        for end in wake:
            os.close(end)
        gc.unfreeze()
        limit = order.get("cpu_seconds", 0)
        if limit:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
        folder = os.path.join(scratch, str(os.getpid()))
        os.mkdir(folder)
        if not sandbox.confine(folder) and sandbox.landlock():
            raise OSError("the kernel has Landlock and does not let a child be confined by it")
        solve_one(fd, folder)
        code = 0
    except BaseException as error:  # noqa: BLE001 – a forked child returns to no caller
        with contextlib.suppress(Exception):
            print(f"solver child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _reap(control: socket.socket, alive: set[int], scratch: str) -> None:
    while alive:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return
        _kill_group(found.si_pid)  # before its id can be anyone else's
        _, status = os.waitpid(found.si_pid, 0)
        alive.discard(found.si_pid)
        shutil.rmtree(os.path.join(scratch, str(found.si_pid)), ignore_errors=True)
        control.send(json.dumps({"ended": found.si_pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def solve_one(fd: int, scratch: str) -> None:
    """Solve the one job of the socket `fd`, with `scratch` as temporary folder."""
    link = Connection(fd)
    try:
        job: dict[str, Any] = json.loads(link.recv_bytes())
    except (EOFError, OSError):
        return
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    cancelled = threading.Event()
    threading.Thread(target=_watch, args=(link, cancelled), daemon=True).start()
    _solve(job, Outbox(link), cancelled)


def _solve(job: dict[str, Any], outbox: Outbox, cancelled: threading.Event) -> None:
    whole: int | None = None

    def report(progress: Progress) -> None:
        nonlocal whole
        if progress.whole_bound_ns is not None:
            whole = progress.whole_bound_ns
        outbox.put(progress)

    try:
        answer = solve(
            Problem.from_json(job["problem"]),
            method=job["method"],
            time_limit_s=job["time_limit_s"],
            max_gap=job["max_gap"],
            options=job["options"],
            start=None if job.get("start") is None else read_plan(job["start"]),
            bound_ns=job.get("bound_ns"),
            proof=None if job.get("proof") is None else read_proof(job["proof"]),
            on_progress=report,
            cancelled=cancelled.is_set,
            certify=job["certify"],
        )
    except (InvalidData, InvalidPlan) as error:
        outbox.finish({"type": "error", "kind": "invalid", "message": str(error)})
    except MemoryError:
        outbox.finish({"type": "error", "kind": "memory", "message": "The solver's memory is used up."})
    except Exception as error:  # a bug of a method must not lose what was streamed before it
        outbox.finish({"type": "error", "kind": "failed", "message": f"{type(error).__name__}: {error}"[:500]})
        raise
    else:
        outbox.finish({"type": "answer", "answer": answer.to_json(), "whole_bound_ns": whole})


class Outbox:
    """Sends from a thread of its own, so that a slow reader never holds up a method.

    Where several improvements wait, only the last is sent: one that nobody was told of can't be lost.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._waiting: Progress | None = None
        self._plan: AnyPlan | None = None
        self._proof: Proof | None = None  # the last one sent
        self._final: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, progress: Progress) -> None:
        """Send an improvement soon."""
        with self._changed:
            self._waiting = progress
            if progress.plan is not None:
                self._plan = progress.plan
            self._changed.notify()

    def finish(self, frame: dict[str, Any]) -> None:
        """Send the last frame, after what still waits; returns when all has left."""
        with self._changed:
            self._final = frame
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        last = 0.0
        while True:
            with self._changed:
                while self._waiting is None and self._final is None:
                    self._changed.wait()
                quiet = last + _QUIET_S - time.monotonic()
                if self._final is None and self._plan is None and quiet > 0:
                    self._changed.wait(quiet)
                progress, plan, final = self._waiting, self._plan, self._final
                self._waiting = self._plan = None
            try:
                if progress is not None:
                    proof = None if progress.proof is self._proof else progress.proof
                    self._proof = progress.proof
                    said = {
                        "plan": None if plan is None else plan.to_json(),
                        "proof": None if proof is None else proof.to_json(),
                    }
                    _write(self._link, {"type": "progress", **progress._asdict(), **said})
                    last = time.monotonic()
                if final is not None:
                    _write(self._link, final)
                    return
            except OSError:
                return


def _watch(link: Connection, cancelled: threading.Event) -> None:
    while True:
        try:
            message = json.loads(link.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(0, signal.SIGKILL)
            return
        if message.get("cancel"):
            cancelled.set()


def _write(link: Connection, message: dict[str, Any]) -> None:
    link.send_bytes(json.dumps(message, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
