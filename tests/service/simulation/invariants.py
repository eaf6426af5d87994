"""What holds after every commit, whoever made it: fences, endings, quotas, shares and tenants, by an eye of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

_SOLVES = (
    "id", "tenant_id", "state", "attempt", "worker", "priority", "spent_s", "plan_id", "cost_ns", "bound_ns",
    "heartbeat_at", "outcome",
)  # fmt: skip
_MOST_PASSES = 6
"""Of solves that are claimed at once, by three servers with two workers each, which is written first is chance."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Eye:
    """Compares the tables before and after each commit.

    Args:
        healthy: whether a process lives, and has never been disturbed.
        moment: the time, in seconds.
        stale_after_s: after which a process that has not been heard of is given up.

    Attributes:
        most_queued, most_running: the quotas, by tenant.
        slowed: some process was slow, and may have kept healthy ones from the only write lock.
    """

    def __init__(
        self, path: str, healthy: Callable[[str], bool], moment: Callable[[], float], stale_after_s: float
    ) -> None:
        self._healthy, self._moment, self._stale_after_s = healthy, moment, stale_after_s
        self._heard: dict[str, tuple[Any, float]] = {}
        self.slowed = False
        self._own = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._solves: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, str] = {}
        self.most_queued: dict[str, int] = {}
        self.most_running: dict[str, int] = {}
        self._queued: dict[str, float] = {}
        self._passed: dict[str, int] = {}
        self.broken: Broken | None = None

    def committed(self, process: str) -> None:
        """Look after a commit of a process; what is wrong is kept, and raised by `check`."""
        if self.broken is None:
            try:
                self._look(process)
            except Broken as error:
                self.broken = error

    def check(self) -> None:
        """Raise what was found.

        Raises:
            Broken: an invariant did not hold after some commit.
        """
        if self.broken is not None:
            raise self.broken

    def close(self) -> None:
        """Look no more."""
        self._own.close()

    def requests(self) -> dict[str, dict[str, Any]]:
        """Every request, by id."""
        return {row["id"]: row for row in self._rows("requests", ("id", "tenant_id", "ended", "solve_id", "answer"))}

    def solves(self) -> dict[str, dict[str, Any]]:
        """Every solve, by id."""
        return {row["id"]: row for row in self._rows("solves", _SOLVES)}

    def _rows(self, table: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
        query = f"SELECT {', '.join(names)} FROM {table} ORDER BY id"
        return [dict(zip(names, row, strict=True)) for row in self._own.execute(query)]

    def _look(self, process: str) -> None:
        before, after = self._solves, self.solves()
        self._solves = after
        for solve_id, row in after.items():
            self._fences(process, before.get(solve_id), row)
            if self._heard.get(solve_id, ("", 0.0))[0] != row["heartbeat_at"]:
                self._heard[solve_id] = row["heartbeat_at"], self._moment()
        for solve_id in before:
            _hold(solve_id in after, f"solve {solve_id} is gone")
        self._quotas(before, after)
        self._shares(process, before, after)
        for request_id, row in self.requests().items():
            if row["solve_id"] is not None:
                _hold(after[row["solve_id"]]["tenant_id"] == row["tenant_id"], f"{request_id} joined another tenant")
            if request_id in self._ended:
                _hold(self._ended[request_id] == row["answer"], f"the answer of {request_id} was changed")
            elif row["ended"]:
                self._ended[request_id] = row["answer"]

    def _fences(self, process: str, old: dict[str, Any] | None, new: dict[str, Any]) -> None:
        name = f"solve {new['id']}, by {process}"
        if old is None:
            _hold(new["state"] == "queued" and new["attempt"] == 0, f"{name}: not queued at first")
            return
        _hold(old["state"] != "ended" or old == new, f"{name}: written after its end")
        _hold(new["attempt"] in (old["attempt"], old["attempt"] + 1), f"{name}: attempts skipped")
        if new["attempt"] > old["attempt"]:
            _hold(new["state"] == "running" and new["worker"] == process, f"{name}: claimed for another")
            _hold(old["state"] == "queued", f"{name}: claimed while it runs")
            return
        if old["state"] == "running" and new["state"] == "queued" and old["worker"] != process:
            silent = self.slowed and self._moment() - self._heard[new["id"]][1] > self._stale_after_s
            idle = not self._healthy(old["worker"])
            _hold(idle or silent, f"{name}: taken from {old['worker']}, which works on it")
        found = [
            k for k in ("spent_s", "plan_id", "cost_ns", "bound_ns", "heartbeat_at", "outcome") if old[k] != new[k]
        ]
        mine = old["state"] == "running" and old["worker"] == process
        _hold(mine or not found, f"{name}: {', '.join(found)} written past the fence")
        _hold(new["spent_s"] >= old["spent_s"], f"{name}: time was unspent")
        better = old["cost_ns"] is None or (new["cost_ns"] is not None and new["cost_ns"] <= old["cost_ns"])
        _hold(better, f"{name}: a better plan was forgotten")

    def _quotas(self, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
        for tenant, most in self.most_queued.items():
            queued = [row for row in after.values() if row["tenant_id"] == tenant and row["state"] == "queued"]
            fresh = any(row["id"] not in before for row in queued)
            _hold(not fresh or len(queued) <= most, f"{len(queued)} queued of {most}")
        for tenant, most in self.most_running.items():
            ids = {row["id"] for row in after.values() if row["tenant_id"] == tenant and row["state"] == "running"}
            fresh = any(before.get(found, {}).get("state") != "running" for found in ids)
            _hold(not fresh or len(ids) <= most, f"{len(ids)} running of {most}")

    def _shares(self, process: str, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
        """A tenant that has long waited and has nothing running is served before another's second solve."""
        running = [row["tenant_id"] for row in before.values() if row["state"] == "running"]
        waiting = {row["tenant_id"] for row in after.values() if row["state"] == "queued"} - set(running)
        waiting = {tenant for tenant in waiting if self.most_running.get(tenant) != 0}
        self._queued = {tenant: self._queued.get(tenant, self._moment()) for tenant in waiting}
        self._passed = {tenant: self._passed.get(tenant, 0) for tenant in waiting}
        claimed = [row["tenant_id"] for key, row in after.items() if before.get(key, row)["attempt"] < row["attempt"]]
        if self.slowed or not self._healthy(process) or not any(tenant in running for tenant in claimed):
            return
        for tenant, since in self._queued.items():
            self._passed[tenant] += tenant not in claimed and self._moment() - since > self._stale_after_s
            _hold(self._passed[tenant] <= _MOST_PASSES, f"{tenant} waits while others get more than their share")


def _hold(condition: bool, text: str) -> None:
    if not condition:
        raise Broken(text)
