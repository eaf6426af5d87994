"""Which tenant is served next: weighted fair queueing over the solver seconds that this process has given to each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Waiting(NamedTuple):
    """A tenant of which something waits.

    Attributes:
        running: the tenant's solves that run now, in all processes.
        queued_s: since when the oldest waits, in seconds since any moment that all tenants share.
        free: how many of those that wait may run now.
    """

    tenant_id: str
    weight: float
    running: int
    queued_s: float
    free: int = 1


class Turns:
    """The virtual time of each tenant: its solver seconds in this process, divided by its weight.

    One that has not waited gains nothing by it: it starts at the least virtual time of those that do wait. Each process
    counts its own seconds, and after a restart from zero; solves that run are counted in the database, for all.

    Example:
        >>> red, blue = Waiting("red", 1.0, 0, 1.0), Waiting("blue", 1.0, 0, 2.0)
        >>> turns = Turns()
        >>> [each.tenant_id for each in turns.order([red, blue])]
        ['red', 'blue']
        >>> turns.spend("red", 5.0)
        >>> [each.tenant_id for each in turns.order([red, blue])]
        ['blue', 'red']
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._least = 0.0

    def order(self, waiting: Iterable[Waiting]) -> list[Waiting]:
        """Who is due, the first one first: fewest running for its weight; least served; longest waiting."""
        found = list(waiting)
        self._weights |= {each.tenant_id: each.weight for each in found}
        served = (self._spent.get(each.tenant_id, 0.0) for each in found)
        self._least = max(self._least, min(served, default=0.0))
        return sorted(found, key=self._key)

    def spend(self, tenant_id: str, seconds: float) -> None:
        """A solve of a tenant has run for so long."""
        at = max(self._spent.get(tenant_id, 0.0), self._least)
        self._spent[tenant_id] = at + seconds / self._weights.get(tenant_id, 1.0)

    def _key(self, each: Waiting) -> tuple[float, float, float, str]:
        served = max(self._spent.get(each.tenant_id, 0.0), self._least)
        return each.running / each.weight, served, each.queued_s, each.tenant_id
