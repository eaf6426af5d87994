"""Time limits are an object: one is made per solve and handed down; no other module reads the clock for itself."""

from __future__ import annotations

import time


class Deadline:
    """A moment at which to stop, and a stopwatch since its making; `seconds=None` never stops."""

    def __init__(self, seconds: float | None) -> None:
        self._start = time.monotonic()
        self._end = None if seconds is None else self._start + seconds

    def elapsed(self) -> float:
        """Seconds since the making."""
        return time.monotonic() - self._start

    def remaining(self) -> float:
        """Seconds left, never negative; infinite without a limit."""
        return float("inf") if self._end is None else max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() >= self._end

    def within(self, seconds: float) -> Deadline:
        """A deadline `seconds` from now, or this one where it comes first."""
        return Deadline(min(seconds, self.remaining()))
