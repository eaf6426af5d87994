"""From a search to the incumbent and back."""

from __future__ import annotations

import time
from typing import Protocol

from remat_ir import Plan

from ..incumbent import Incumbent

_SHARE = 9
"""How many times as long as making and verifying a plan the search goes on before it delivers the next one."""
_REST_S = 0.02


class Finder(Protocol):
    """What finds plans: the cost of the best one, and the plan itself."""

    @property
    def cost_ns(self) -> int | None:
        """Of the best plan found, in ns."""

    def plan(self) -> Plan | None:
        """The best plan found."""


class Delivery:
    """Brings a search's plans to the incumbent, not so often that making and verifying them becomes the main work."""

    def __init__(self, search: Finder, incumbent: Incumbent, source: str) -> None:
        self.search, self.incumbent, self.source = search, incumbent, source
        self.due = 0.0

    def check(self) -> bool:
        """Deliver if it is time to; whether the search should stop."""
        stopped = self.incumbent.stopped()
        while not stopped and self.incumbent.claimed_enough():
            # all that is left is to certify a claim: the cores are for that
            time.sleep(_REST_S)
            stopped = self.incumbent.stopped()
        if stopped or self.incumbent.cost_ns is None or self.incumbent.deadline.elapsed() >= self.due:
            self.deliver()
        return stopped or self.incumbent.stopped()

    def deliver(self) -> None:
        """Offer the best plan if the incumbent's is more expensive."""
        cost, known = self.search.cost_ns, self.incumbent.cost_ns
        if cost is None or (known is not None and known <= cost):
            return
        start = self.incumbent.deadline.elapsed()
        plan = self.search.plan()
        if plan is not None:
            self.incumbent.offer(plan, self.source)
        end = self.incumbent.deadline.elapsed()
        self.due = end + _SHARE * (end - start)

    def cheaper(self) -> Plan | None:
        """The incumbent's plan where it costs less than the search's."""
        plan, cost, own = self.incumbent.plan, self.incumbent.cost_ns, self.search.cost_ns
        return plan if isinstance(plan, Plan) and cost is not None and (own is None or cost < own) else None
