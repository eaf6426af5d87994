"""Plans from sequences that others came across, and that may not fit the budget yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..incumbent import Incumbent
from .delivery import Delivery
from .local import Search
from .restarts import SLICE
from .temperatures import COOL, COOLEST

_KEPT = 4
_MOVES = 8 * SLICE
"""Moves of one cycle: where a few short ones lead differs more than where a long one does."""


class Starts:
    """A search that makes short cool cycles from the last few sequences of relaxations, in turn, the newest first.

    Any thread may add a sequence; one thread runs the search.
    """

    def __init__(self, incumbent: Incumbent, seed: int) -> None:
        self._incumbent, self._seed = incumbent, seed
        self._recent: deque[Sequence[int]] = deque(maxlen=_KEPT)
        self._new = 0
        self._search: Search | None = None

    def add(self, sequence: Sequence[int]) -> None:
        """Take a sequence, which is the next one; the oldest is forgotten."""
        self._recent.appendleft(sequence)
        self._new = 0

    def run(self, moves: int) -> None:
        """Go on until so many moves have been made since the first call, where there are starts at all."""
        problem = self._incumbent.problem
        while self._recent:
            search = self._search = self._search or Search(problem.graph, problem.budget_bytes, self._seed)
            if search.moves >= moves:
                return
            start = self._recent[self._new % len(self._recent)]
            self._new += 1
            delivery = Delivery(search, self._incumbent, "search")
            if not search.adopt(start) or search.cool(_MOVES, (COOL, COOLEST)[self._new % 2], delivery.check):
                return
            delivery.deliver()
