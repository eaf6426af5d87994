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
