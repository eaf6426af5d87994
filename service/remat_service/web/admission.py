"""How many requests of one tenant are under way at once, and how many of them are streams."""

from __future__ import annotations

from collections import Counter

from ..errors import RateLimited


class Admission:
    """Counts by tenant what is under way: requests from the moment their key is known, streams as long as they last."""

    def __init__(self, most_per_tenant: int, what: str = "requests") -> None:
        self._most, self._what = most_per_tenant, what
        self._under_way: Counter[str] = Counter()

    def enter(self, tenant_id: str) -> None:
        """One more.

        Raises:
            RateLimited: there are too many already.
        """
        if self._under_way[tenant_id] >= self._most:
            raise RateLimited(
                f"{self._most} {self._what} of this tenant are under way, the most at once", retry_after_s=1
            )
        self._under_way[tenant_id] += 1

    def leave(self, tenant_id: str) -> None:
        """One has ended."""
        self._under_way[tenant_id] -= 1
        if not self._under_way[tenant_id]:
            del self._under_way[tenant_id]
