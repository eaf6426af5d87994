"""How long requests have waited in the queue, by this process's own clock: the wall clock may jump."""

from __future__ import annotations

from collections.abc import Iterable

from .clock import Clock


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
