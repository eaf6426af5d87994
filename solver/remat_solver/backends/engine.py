"""The parent's side of an engine: a child process that is fed programs and killed when its time is over."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ..deadline import Deadline
from ..program import Floats, Program
from .outcome import Best, Outcome
from .wire import Message, program_arrays, receive, send

ENGINES = ("highs", "cbc")

_POLL_S = 0.05
"""How often a waiting run looks whether it was stopped."""

_WORKER = """\
import sys, types
package = types.ModuleType("remat_solver")
package.__path__ = [sys.argv.pop(1)]
sys.modules["remat_solver"] = package
from remat_solver.backends.worker import main
main(sys.argv[1:])
"""
"""What a child runs: the worker module without the package's own `__init__`, which wires in every method and all that
they import, for a second or more."""

_NO_MEMORY = (
    "MemoryError",
    "can't start new thread",
    "bad_alloc",
    "terminate called recursively",  # by a second thread without memory, while the first one is to say so
    "Cannot allocate memory",
    "cannot map zero-fill",
    "emory allocation",
)
"""How engines, their libraries and the loader say that an allocation was refused."""

_LEAST_MEMORY = 2**30

_GRACE_S = {"highs": 0.3, "cbc": 0.9}
"""How long a stopped engine may take to hand over its last word. CBC's only solution is the one that it writes then."""
_TREE_GRACE_S = 1.5
"""The same for a tree, which is handed over whole or not at all."""
_AHEAD_SHARE, _TREE_AHEAD_SHARE = 0.1, 0.25
"""The share of the time left that an engine, or a tree, is stopped ahead of its deadline for that, at most."""
_LATE_S = 0.05
"""What of it may lie behind the deadline."""


class Engine:
    """One engine in one child process, for as many runs as wanted, one at a time; a context manager.

    The child belongs to the caller's process group. It is killed at the deadline of a run, and started afresh for the
    next one; it ends itself when this process or the thread that started it dies. What a killed engine had found stays
    found, because solutions and bounds are streamed.

    Args:
        name: one of `ENGINES`.
        memory_bytes: memory that the child may use; 0 is half of what is free when it starts, but no less than 1 GiB.
            An engine that wants more ends, and the run with it: `Outcome.out_of_memory`.
    """

    def __init__(self, name: str, *, memory_bytes: int = 0) -> None:
        if name not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
        self.name = name
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._news: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._errors: Any = None
        self._lock = threading.Lock()
        self._start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._drop()

    @property
    def pid(self) -> int | None:
        """The child's process id, None when there is no child."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the child, and wait until it is gone; a later run starts another."""
        ending = self._drop()
        if ending is not None:
            ending.join()

    def _drop(self) -> threading.Thread | None:
        """Kill the child; a thread waits for its end.

        A process of 0.5 GB takes 0.1 s to end: who has an answer by then, or is late, does not wait for that.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        ending = threading.Thread(target=_end, args=(process, self._errors), name=f"{self.name}-end", daemon=True)
        ending.start()
        return ending

    def run(
        self,
        program: Program,
        *,
        deadline: Deadline | None = None,
        start: Floats | None = None,
        on_improvement: Callable[[Floats | None, float], None] | None = None,
        stopped: Callable[[], bool] | None = None,
        absolute_gap: float = 0.0,
        relative_gap: float = 0.0,
        threads: int = 1,
        seed: int = 0,
        turn_s: float | None = None,
    ) -> Outcome:
        """Solve a mixed integer program.

        Args:
            deadline: the engine is killed when it passes. Of one that counts work, linear programs and trees end after
                so much of it, and count what they took; nothing else ends them.
            start: [columns] a solution to start from; NaN where unknown.
            on_improvement: called in this thread, at each better solution or bound, with the solution, None where it is
                an older one, and the best bound, −inf before there is one; must be quick.
            stopped: polled every 50 ms; once it returns True the engine is stopped and its best returned.
            absolute_gap, relative_gap: the engine may stop at either; "optimal" is meant within them.
            turn_s: CPU seconds after which HiGHS returns its best, however busy the machine is; others take no notice.
        """
        members = {
            "absolute_gap": absolute_gap,
            "relative_gap": relative_gap,
            "threads": threads,
            "seed": seed,
            "turn_s": turn_s,
        }
        arrays: dict[str, Any] = {}
        if start is not None:
            if start.shape != (program.columns,):
                raise ValueError(f"a start needs {program.columns} numbers, not shape {start.shape}")
            arrays["start"] = start.astype("float64")
        return self._ask("solve", program, members, arrays, deadline, on_improvement, stopped)

    def lp(
        self,
        program: Program,
        *,
        deadline: Deadline | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Outcome:
        """Solve the LP relaxation by dual simplex, with duals and reduced costs; HiGHS only."""
        return self._ask("lp", program, {}, {}, deadline, None, stopped)

    def tree(
        self,
        program: Program,
        *,
        cutoff: float,
        deadline: Deadline | None,
        stopped: Callable[[], bool] | None,
        factor: Floats | None = None,
        turn_s: float | None = None,
        cutoff_row: tuple[int, float] | None = None,
        node_s: float = 0.0,
    ) -> Outcome:
        """Branch on integer columns until each leaf's linear program reaches the cutoff, or time is up; HiGHS only.

        Args:
            factor: [rows] the powers of two by which rows in whole numbers, each with one side, over whole columns were
                multiplied; then cutting planes are added first.
            turn_s: CPU seconds after which it ends as it does when time is up.
            cutoff_row: that of points that cost less than the cutoff, and the bound that holds once there are none.
            node_s: what each node takes afterwards, in seconds that are left for that before the deadline.
        """
        members = {"cutoff": cutoff, "turn_s": turn_s, "cutoff_row": cutoff_row, "node_s": node_s}
        arrays: dict[str, Any] = {} if factor is None else {"factor": factor}
        return self._ask("tree", program, members, arrays, deadline, None, stopped)

    def _ask(
        self,
        kind: str,
        program: Program,
        members: dict[str, Any],
        arrays: dict[str, Any],
        deadline: Deadline | None,
        on_improvement: Callable[[Floats | None, float], None] | None,
        stopped: Callable[[], bool] | None,
    ) -> Outcome:
        if kind != "solve" and self.name != "highs":
            raise ValueError(f"only HiGHS solves linear programs here, not {self.name}")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the engine is busy: one run at a time")
        try:
            left = math.inf if deadline is None else deadline.remaining()
            work = None if deadline is None else deadline.work
            watch = Deadline(None if math.isinf(left) or work is not None else left, work)
            if left <= 0:
                return Best(program).stopped("no time was left")
            self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            limit = watch.remaining()
            ahead_s, grace_s = last_word(self.name, kind, limit)
            if work is not None:
                # when news come, and when somebody looks, the clock decides
                members["work_s"], on_improvement, stopped = left, None, None
            members["offset"] = program.offset
            members["time_limit_s"] = None if math.isinf(limit) else limit - ahead_s
            # a child that does not read would have the write wait for ever; one that reads until then has found nothing
            guard = None if math.isinf(limit) else threading.Timer(limit, process.kill)
            try:
                if guard is not None:
                    guard.daemon = True
                    guard.start()
                send(process.stdin, kind, members, program_arrays(program) | arrays)
            except OSError:
                if watch.passed():
                    # killed by the guard: it is the time that is used up, not the child's memory
                    self._drop()
                    return Best(program).stopped("the time was up")
                return self._died(Best(program))
            finally:
                if guard is not None:
                    guard.cancel()
            return self._listen(program, watch, on_improvement, stopped, ahead_s, grace_s)
        finally:
            self._lock.release()

    def _listen(
        self,
        program: Program,
        watch: Deadline,
        on_improvement: Callable[[Floats | None, float], None] | None,
        stopped: Callable[[], bool] | None,
        ahead_s: float,
        grace_s: float,
    ) -> Outcome:
        best = Best(program)
        stopping: Deadline | None = None
        why = ""
        while True:
            try:
                wait = watch.remaining() - ahead_s if stopping is None else stopping.remaining()
                message = self._news.get(timeout=min(_POLL_S, max(wait, 0.001)))
            except queue.Empty:
                if self._process is None or (self._process.poll() is not None and self._news.empty()):
                    return self._died(best)
            else:
                if message is None:
                    return self._died(best)
                if message.kind in ("outcome", "failed"):
                    watch.spend(message.members.get("work_s", 0.0))
                    return best.outcome(message, why)
                if message.kind == "improvement" and best.take(message) and on_improvement is not None:
                    on_improvement(best.x if "x" in message.arrays else None, best.bound)
            late = watch.remaining() <= ahead_s
            if stopping is None and (late or (stopped is not None and stopped())):
                why = "the time was up" if late else "stopped"
                stopping = Deadline(min(grace_s, watch.remaining() + _LATE_S))
                self._say_stop()
            elif stopping is not None and stopping.passed():
                self._drop()
                return best.stopped(why)

    def _say_stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                send(self._process.stdin, "stop")

    def _died(self, best: Best) -> Outcome:
        process = self._process
        code: int | None = None
        last = ""
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1.0)
            with contextlib.suppress(OSError, ValueError):
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").strip().splitlines()
                last = f": {lines[-1][:300]}" if lines else ""
                if any(word in line for line in lines for word in _NO_MEMORY):
                    last = ", out of the memory that it may use" + last
        self.close()
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return best.broken(f"the process of {self.name} ended {how}{last}")

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._news = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        command = [sys.executable, "-c", _WORKER, str(Path(__file__).parents[1]), self.name, str(os.getpid())]
        command.append(str(self._memory_bytes or free_memory()))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=_environment()
        )
        threading.Thread(
            target=_hear, args=(self._process.stdout, self._news), name=f"{self.name}-hear", daemon=True
        ).start()


def last_word(name: str, kind: str, left_s: float) -> tuple[float, float]:
    """How long before its deadline an engine is told to stop, and how long it then has for its last word, in seconds.

    No more than 0.05 s of that lies behind the deadline, however long the engine would like; none of it
    where the time left has room for all before: a killed process takes its time to end, too.
    """
    share, grace_s = (_TREE_AHEAD_SHARE, _TREE_GRACE_S) if kind == "tree" else (_AHEAD_SHARE, _GRACE_S[name])
    ahead_s = min(grace_s, share * left_s)
    return ahead_s, min(grace_s, ahead_s + _LATE_S)


def free_memory() -> int:
    """What an engine may use unless told otherwise: half of what is free, but no less than 1 GiB."""
    return max(_LEAST_MEMORY, int(psutil.virtual_memory().available // 2))


def _end(process: subprocess.Popen[bytes], errors: Any) -> None:
    """Wait for a killed child, then close what led to it: a pipe that is still read closes only once its child ends."""
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _hear(stream: Any, news: queue.SimpleQueue[Message | None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while (message := receive(stream)) is not None:
            news.put(message)
    news.put(None)


def _environment() -> dict[str, str]:
    """The child's environment: the same modules to import, and no thread pools that nobody asked for."""
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
