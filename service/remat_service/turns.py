"""Which tenant is served next: weighted fair queueing over the solver seconds that this process has given to each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Waiting(NamedTuple):
    """A tenant's next solve, by its own priorities: one candidate.

    Attributes:
        taken_over: it was running already, in a process that has fallen silent.
        running: the tenant's solves that run now, in all processes.
        queued_s: when it was queued, in seconds since any moment that all candidates share.
    """

    solve_id: str
    tenant_id: str
    weight: float
    taken_over: bool
    running: int
    queued_s: float


class Turns:
    """The virtual time of each tenant: its solver seconds in this process, divided by its weight.

    One that has not waited gains nothing by it: it starts at the least virtual time of those that do wait. Each process
    counts its own seconds, and after a restart from zero; solves that run are counted in the database, for all.

    Example:
        >>> red, blue = Waiting("1", "red", 1.0, False, 0, 1.0), Waiting("2", "blue", 1.0, False, 0, 2.0)
        >>> turns = Turns()
        >>> turns.next([red, blue]).tenant_id
        'red'
        >>> turns.spend("red", 5.0)
        >>> turns.next([red, blue]).tenant_id
        'blue'
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._least = 0.0

    def next(self, waiting: Iterable[Waiting]) -> Waiting | None:
        """The candidate that is due: what was running already; fewest running for its weight; least served; oldest."""
        candidates = list(waiting)
        if not candidates:
            return None
        self._weights |= {each.tenant_id: each.weight for each in candidates}
        self._least = max(self._least, min(self._spent.get(each.tenant_id, 0.0) for each in candidates))
        return min(candidates, key=self._order)

    def spend(self, tenant_id: str, seconds: float) -> None:
        """A solve of a tenant has run for so long."""
        at = max(self._spent.get(tenant_id, 0.0), self._least)
        self._spent[tenant_id] = at + seconds / self._weights.get(tenant_id, 1.0)

    def _order(self, each: Waiting) -> tuple[bool, float, float, float, str]:
        served = max(self._spent.get(each.tenant_id, 0.0), self._least)
        return not each.taken_over, each.running / each.weight, served, each.queued_s, each.solve_id
