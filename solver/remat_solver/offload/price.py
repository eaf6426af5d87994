"""The host's limit, which the program has no state for: moves have a price, and the right one is looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from remat_ir import Chain

from .schedule import Schedule, moved_bytes
from .table import OffloadTable

COARSE = 25
"""Slots of the first tables where the host has a limit: each price takes a table."""

FREE = (0.0, 0.0)
"""The prices before any was tried."""

_HALVINGS = 10
_HALVINGS_AROUND = 4


class Priced:
    """The schedules of one table, at the prices that its moves may have.

    A price, in ns a byte that is moved, is the multiplier of the host's limit: the schedule at a price is the best of
    all that move no more than it does. So where that is just within the limit, little is lost.

    Args:
        prices: the lowest and the highest to try, or `FREE` to look through all.
        stop: asked while a table is filled, which `TimeUp` then ends.
    """

    def __init__(
        self,
        chain: Chain,
        budget_bytes: int,
        slots: int,
        nearest: bool,
        prices: tuple[float, float],
        stop: Callable[[], bool],
    ) -> None:
        self._stop = stop
        self._chain, self._budget_bytes, self._slots, self._nearest = chain, budget_bytes, slots, nearest
        # above the highest, the least move costs more than everything else could gain
        highest = float(chain.total_cost_ns * chain.stages)
        self._low, self._high = prices if prices != FREE else (highest / 2.0**60, highest)
        self._halvings = _HALVINGS if prices == FREE else _HALVINGS_AROUND
        self._free = False
        self.found = False

    def schedules(self) -> Iterator[Schedule]:
        """The best schedule; where it moves more than the host holds, those that do not, at prices ever closer."""
        found = self._at(0.0)
        if found is None or self._fits(found):
            self._free = True
            if found is not None:
                yield found
            return
        for _ in range(self._halvings):
            middle = (self._low * self._high) ** 0.5
            found = self._at(middle)
            if found is None or self._fits(found):
                self._high = middle
                if found is not None:
                    yield found
            else:
                self._low = middle

    def around(self) -> tuple[float, float]:
        """The prices to try in a finer table."""
        return FREE if self._free else (self._low / 16, self._high * 16)

    def _at(self, price: float) -> Schedule | None:
        table = OffloadTable(
            self._chain, self._budget_bytes, self._slots, nearest=self._nearest, price=price, stop=self._stop
        )
        found = table.schedule()
        self.found = self.found or found is not None
        return found

    def _fits(self, schedule: Schedule) -> bool:
        limit = self._chain.host_bytes
        return limit is None or moved_bytes(self._chain, schedule) <= limit
