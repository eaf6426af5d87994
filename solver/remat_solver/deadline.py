"""Time limits are an object: one is made per solve and handed down; no other module reads the clock for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeUp(Exception):
    """What is of no use before it is done, such as a program, was left half done: its `stop` said so."""


def never() -> bool:
    """Nothing stops it."""
    return False


def look(stop: Callable[[], bool]) -> None:
    """Raise `TimeUp` where `stop` says so."""
    if stop():
        raise TimeUp


class Work:
    """Seconds that are counted in place of those of a clock: each piece of work has its price, the same on any machine.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


class Deadline:
    """A moment at which to stop, and a stopwatch since its making; `seconds=None` never stops.

    Attributes:
        work: what is counted in place of the clock; None: the clock.
    """

    def __init__(self, seconds: float | None, work: Work | None = None) -> None:
        self.work = work
        self._start = time.monotonic() if work is None else work.seconds
        self._end = None if seconds is None else self._start + seconds
        self._held_at: float | None = None

    def elapsed(self) -> float:
        """Seconds since the making."""
        return self._now() - self._start

    def remaining(self) -> float:
        """Seconds left, never negative; infinite without a limit."""
        return float("inf") if self._end is None else max(0.0, self._end - self._now())

    def passed(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and self._now() >= self._end

    def within(self, seconds: float) -> Deadline:
        """A deadline `seconds` from now, or this one where it comes first."""
        return Deadline(min(seconds, self.remaining()), self.work)

    def spend(self, seconds: float) -> None:
        """Count work that was done; nothing where the clock counts."""
        if self.work is not None:
            self.work.seconds += seconds

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the watch meanwhile: what is waited for is not part of the solve. For one thread, before others look."""
        if self.work is not None:
            yield
            return
        self._held_at = time.monotonic()
        try:
            yield
        finally:
            waited = time.monotonic() - self._held_at
            self._held_at = None
            self._start += waited
            self._end = None if self._end is None else self._end + waited

    def _now(self) -> float:
        if self.work is not None:
            return self.work.seconds
        return time.monotonic() if self._held_at is None else self._held_at
