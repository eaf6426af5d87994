"""How many requests of one tenant are under way at once, how many come in a second, and how many are streams."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from ..errors import RateLimited


class Admission:
    """Counts by tenant what is under way: requests from the moment their key is known, streams as long as they last.

    Args:
        rate: of requests a second, after a burst of one second's; 0 for no limit.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        most_per_tenant: int,
        what: str = "requests",
        rate: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._what, self._rate, self._clock = most_per_tenant, what, rate, clock
        self._under_way: Counter[str] = Counter()
        self._full_at: dict[str, float] = {}  # when a tenant's bucket is full again: one that is full is forgotten

    def enter(self, tenant_id: str) -> None:
        """One more.

        Raises:
            RateLimited: there are too many already, or they come too fast.
        """
        if self._under_way[tenant_id] >= self._most:
            raise RateLimited(
                f"{self._most} {self._what} of this tenant are under way, the most at once", retry_after_s=1
            )
        if self._rate:
            self._spend(tenant_id)
        self._under_way[tenant_id] += 1

    def _spend(self, tenant_id: str) -> None:
        now = self._clock()
        if len(self._full_at) > 10_000:
            self._full_at = {known: at for known, at in self._full_at.items() if at > now}
        full_at = max(now, self._full_at.get(tenant_id, now)) + 1.0 / self._rate
        late_s = full_at - now - max(1.0, 1.0 / self._rate)
        if late_s > 1e-9:
            raise RateLimited(
                f"{self._what} of this tenant come faster than {self._rate:g} a second", retry_after_s=math.ceil(late_s)
            )
        self._full_at[tenant_id] = full_at

    def leave(self, tenant_id: str) -> None:
        """One has ended."""
        self._under_way[tenant_id] -= 1
        if not self._under_way[tenant_id]:
            del self._under_way[tenant_id]
