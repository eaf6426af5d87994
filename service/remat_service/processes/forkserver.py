"""The forkserver of solver children: a small single-threaded process that has everything slow loaded, and forks.

A fork of it starts in milliseconds where a fresh interpreter takes hundreds. It holds numpy, the solver's Python and
its compiled kernels, but no engine, no secret, no database connection.
Each child leads its own process group, so that engines started inside it end with it. When a child ends in any way,
the rest of its group is killed before its id is given back, and its temporary folder removed; when the service ends in
any way, the control socket does, and every group is killed.

Control socket: the forkserver says `{"compiling": pid}` where kernels are missing, then `{"ready": pid}`. The service
sends one datagram a child, with the child's socket attached; the forkserver answers `{"started": pid, "order": n}`,
with the number that came in the order, and later `{"ended": pid, "status": n}`.
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

from remat_solver import all_cached, load_for_forks

from . import child, sandbox

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
        code = child.main(fd, folder)
    except BaseException as error:
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


if __name__ == "__main__":
    main()
