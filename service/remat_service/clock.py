"""Where the service asks for the time: an argument of the database, so that a simulation can hand in its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime


class Clock:
    """Time as the operating system tells it."""

    def now(self) -> datetime:
        """This moment, aware; it may jump, and differ between machines."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since some moment; they only grow. The clock of the event loop, by which timeouts are counted."""
        return time.monotonic()

    def new_id(self) -> str:
        """A fresh id: 64 bits of nanoseconds, so ids sort by age, and 64 random ones, so that none can be guessed."""
        return f"{time.time_ns():016x}{os.urandom(8).hex()}"


SYSTEM = Clock()
"""For administration and credentials, which no simulation schedules."""


class Waits:
    """Since when this process has known of each request that has a limit; a process that starts anew counts anew."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def moment(self) -> float:
        """Seconds that only grow."""
        return self._clock.monotonic()

    def begin(self, request_id: str) -> None:
        """A request waits from now on, unless that is known already."""
        self._since.setdefault(request_id, self.moment())

    def forget_others(self, request_ids: Iterable[str], asked: float) -> None:
        """Only these still waited at a look that began at `asked`; those that have come since stay, too."""
        left = frozenset(request_ids)
        self._since = {found: since for found, since in self._since.items() if found in left or since >= asked}

    def seconds(self, request_id: str, until: float) -> float:
        """How long a request had waited at a moment, for certain."""
        return until - self._since.get(request_id, until)


class LookTime:
    """The time that a look may take; without an end where `within_s` is None."""

    def __init__(self, clock: Clock, within_s: float | None, begun: float | None = None) -> None:
        self._clock, self._within_s = clock, within_s
        self._begun = clock.monotonic() if begun is None else begun

    def spent(self) -> float:
        """Seconds since it began."""
        return self._clock.monotonic() - self._begun

    def left(self) -> float | None:
        """Seconds that are left."""
        return None if self._within_s is None else max(0.0, self._within_s - self.spent())

    def over(self) -> bool:
        """Whether it has ended."""
        return self.left() == 0.0

    def share(self, whole: bool) -> LookTime:
        """All of it, or half: the other half is for a plan, where there is none yet."""
        within_s = self._within_s
        return self if whole or within_s is None else LookTime(self._clock, within_s / 2, self._begun)
