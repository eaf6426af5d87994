"""Where the service asks for the time: an argument of the database, so that a simulation can hand in its own."""

from __future__ import annotations

import os
import time
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
