"""The engine's side, the child of `Engine`: `worker ENGINE PARENT_PID [MEMORY_BYTES]` on its standard streams."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .wire import Message, program_of, receive, send


class Link:
    """What a running engine sees of its parent: where to report, whether to stop, what to undo when all ends.

    Attributes:
        stop: set when the parent wants the run to end.
        on_stop: called from the listening thread when it is set; None when there is nothing to wake.
        at_exit: called before the process leaves because its parent is gone.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._sent_bound = -float("inf")
        self.stop = threading.Event()
        self.on_stop: Callable[[], None] | None = None
        self.at_exit: Callable[[], None] | None = None

    def begin(self) -> None:
        """Forget the last run."""
        self.stop.clear()
        self.on_stop = None
        self._sent_bound = -float("inf")

    def improved(self, *, x: NDArray[Any] | None = None, bound: float | None = None) -> None:
        """Stream a solution, a bound, or both; a bound that says nothing new is not sent."""
        news = bound is not None and np.isfinite(bound) and bound > self._sent_bound
        if news:
            assert bound is not None
            self._sent_bound = bound
        if x is not None or news:
            arrays = {} if x is None else {"x": np.array(x, dtype=np.float64)}
            self.say("improvement", {"bound": bound} if news else {}, arrays)

    def say(
        self, kind: str, members: Mapping[str, Any] | None = None, arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Send one message; safe from any thread."""
        with self._lock:
            send(self._out, kind, members, arrays)


def tie_to_parent() -> Callable[[], Any] | None:
    """What has the kernel kill a process when the thread that started it dies; Linux only, elsewhere nothing.

    The end of standard input says the same, but only while the interpreter can be reached: an engine that is deep in
    native code without releasing the interpreter would not notice. It is made before a fork, after which nothing may be
    imported.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def die_with_parent(parent: int) -> None:
    """Tie this process to the thread that started it, and leave if that is gone already."""
    if (tie := tie_to_parent()) is not None:
        tie()
        if os.getppid() != parent:
            os._exit(1)


def limit_memory(memory_bytes: int) -> None:
    """Refuse memory beyond this: an allocation then fails in this process instead of starving the machine.

    What counts on Linux are writable private pages, asked for and maybe never touched; libraries' code does not.
    Children inherit the limit.
    """
    import resource

    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    with contextlib.suppress(ValueError, OSError):  # refused where a lower limit is set already
        resource.setrlimit(kind, (memory_bytes, memory_bytes))


def _listen(link: Link, source: IO[bytes], work: queue.SimpleQueue[Message]) -> None:
    """Take messages until the parent is gone, then leave at once."""
    code = 0
    try:
        while (message := receive(source)) is not None:
            if message.kind == "stop":
                link.stop.set()
                if link.on_stop is not None:
                    link.on_stop()
            else:
                work.put(message)
    except OSError:
        pass
    except MemoryError:
        # the rest of the message is never read: only leaving tells the parent, which is still writing it
        sys.stderr.write("MemoryError\n")
        sys.stderr.flush()
        code = 1
    if link.at_exit is not None:
        link.at_exit()
    os._exit(code)


def main(arguments: list[str]) -> None:
    """Serve runs until standard input ends."""
    name, parent = arguments[0], int(arguments[1])
    die_with_parent(parent)
    if len(arguments) > 2:
        limit_memory(int(arguments[2]))
    # engines print to standard output when they feel like it: the messages get a descriptor of their own
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    link = Link(out)
    work: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, sys.stdin.buffer, work), daemon=True).start()
    engine = importlib.import_module(f".{name}", __package__)
    while True:
        message = work.get()
        link.begin()
        try:
            engine.serve(message.kind, program_of(message), message.members, message.arrays, link)
        except MemoryError:
            link.say("failed", {"message": f"{name} ran out of the memory that it may use"})
        except Exception as error:  # noqa: BLE001 – said to the solve, which goes on
            link.say("failed", {"message": f"{name}: {type(error).__name__}: {error}"})
