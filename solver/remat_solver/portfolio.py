"""A portfolio: methods that work on one incumbent side by side, each in a thread."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from .incumbent import Incumbent

_NICE = 3
"""With so much more niceness a thread gets half as much of a core as another one that wants it, too."""


def give_way() -> None:
    """Leave two thirds of a core to other threads and processes that want it, for as long as this thread runs."""
    if sys.platform == "linux":
        # there a thread has a niceness of its own
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, nice + _NICE))


class Member:
    """A method in a thread next to this one, which fails with it: its failure ends the solve, and `join` raises it."""

    def __init__(self, incumbent: Incumbent, name: str, work: Callable[[], None]) -> None:
        self._incumbent, self._work = incumbent, work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 – raised where the thread is joined
            self._failure = error
            self._incumbent.close()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for the end, for so long at most."""
        self._thread.join(seconds)

    def join(self) -> None:
        """Wait for the end, and raise what the thread raised.

        A thread that does not come back within half a second of a reason to stop (a compiler can't be interrupted) is
        left behind, and nothing that it may still find is taken.
        """
        while self._thread.is_alive() and not self._incumbent.stopped():
            self._thread.join(0.05)
        self._thread.join(0.5)
        if self._thread.is_alive():
            self._incumbent.close()
        if self._failure is not None:
            raise self._failure
