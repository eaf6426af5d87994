"""An event loop whose time jumps to the next timer, and the clock that one simulated machine reads."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from remat_service.clock import Clock

_BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
_THREAD_S = 0.002  # the most that work given to a thread takes


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: where no task is ready, time is the next timer's. Work for threads is done in place."""

    def __init__(self, dice: Random) -> None:
        self.moment, self._dice = 0.0, dice
        super().__init__(_Timers(self))

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self.moment

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """The result of the function, a moment later."""
        done = self.create_future()

        def tell() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:
                done.set_exception(error)

        self.call_later(self._dice.uniform(0.0, _THREAD_S), tell)
        return done


class _Timers(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """No file is waited for: the time passes at once."""
        if timeout is None:
            raise RuntimeError("everything waits for something that never comes")
        self._virtual.moment += timeout
        return []


class MachineClock(Clock):
    """The clock of one machine: it may be wrong by `skew_s`, and jumps when that is set.

    Each look takes a microsecond, so that no two moments are the same.
    """

    def __init__(self, loop: VirtualLoop, dice: Random) -> None:
        self._loop, self._dice = loop, dice
        self._looks = 0
        self.skew_s = 0.0

    def now(self) -> datetime:
        """The machine's wall time."""
        self._looks += 1
        return _BEGIN + timedelta(seconds=self._loop.moment + self.skew_s, microseconds=self._looks)

    def monotonic(self) -> float:
        """The loop's time."""
        return self._loop.moment

    def new_id(self) -> str:
        """As the service makes them, its random part from the seed."""
        nanoseconds = (self.now() - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
        return f"{nanoseconds:016x}{self._dice.getrandbits(64):016x}"
