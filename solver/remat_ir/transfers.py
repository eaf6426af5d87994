"""What of a graph's values is on the host or under way while a plan runs."""

from __future__ import annotations

from .errors import InvalidPlan
from .graph import Graph
from .link import Link
from .words import readable


class Transfers:
    """What of a graph's values is on the host or under way, and when each direction of the link is free again.

    A value is in one of five places: on the device alone; on the device while its copy out runs (`leaving`); on both
    (`copied`); on the host alone (`away`); on the host while its copy back runs (`returning`).

    Attributes:
        host_bytes: what the host holds: each copy from the start of its copy out until its copy back has been waited
            for, or until the value is freed.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.leaving: dict[int, int] = {}  # value -> when its copy ends
        self.returning: dict[int, int] = {}
        self.copied: set[int] = set()
        self.away: set[int] = set()
        self.host_bytes = 0
        self._out_free_ns = self._back_free_ns = 0

    def offload(self, link: Link, value: int, now_ns: int, step: int) -> tuple[int, int]:
        """Begin to copy a resident value out, behind the copies before it; when the copy begins and ends."""
        if value in self.leaving or value in self.copied:
            raise InvalidPlan(f"value {value} is offloaded but already has a copy on the host", step)
        self.host_bytes += self.graph.value_bytes[value]
        if link.host_bytes is not None and self.host_bytes > link.host_bytes:
            raise InvalidPlan(
                f"the host would hold {readable(self.host_bytes)}, over its limit of {readable(link.host_bytes)}", step
            )
        begin = max(now_ns, self._out_free_ns)
        self._out_free_ns = self.leaving[value] = begin + link.to_host_ns(self.graph.value_bytes[value])
        return begin, self._out_free_ns

    def prefetch(self, link: Link, value: int, now_ns: int, step: int) -> tuple[int, int]:
        """Begin to copy a value back that is on the host alone; when the copy begins and ends."""
        if value not in self.away:
            raise InvalidPlan(f"value {value} is prefetched but not on the host alone", step)
        self.away.remove(value)
        begin = max(now_ns, self._back_free_ns)
        self._back_free_ns = self.returning[value] = begin + link.to_device_ns(self.graph.value_bytes[value])
        return begin, self._back_free_ns

    def wait(self, value: int, step: int) -> tuple[int, bool]:
        """When the running copy of a value ends, and whether the value is back on the device."""
        if value in self.leaving:
            self.copied.add(value)
            return self.leaving.pop(value), False
        if value not in self.returning:
            raise InvalidPlan(f"wait for value {value}, which is not being copied", step)
        self.host_bytes -= self.graph.value_bytes[value]
        return self.returning.pop(value), True

    def drop(self, value: int, step: int) -> None:
        """Let go of the device's copy of a value whose copy out has been waited for."""
        if value not in self.copied:
            raise InvalidPlan(f"value {value} is dropped, but no copy of it to the host has been waited for", step)
        self.copied.remove(value)
        self.away.add(value)

    def freed(self, value: int, step: int) -> None:
        """Let go of a copy on the host that was never needed."""
        if value in self.leaving:
            raise InvalidPlan(f"value {value} is freed while it is copied to the host", step)
        if value in self.copied:
            self.copied.remove(value)
            self.host_bytes -= self.graph.value_bytes[value]

    def check_made(self, op: int, value: int, kept: bool, step: int) -> None:
        """Refuse a computation of a value that is on its way back, and keeping one that is on the host."""
        if value in self.returning:
            raise InvalidPlan(f"op {op} makes value {value} while it is prefetched", step)
        if kept and value in self.away:
            raise InvalidPlan(f"op {op} keeps value {value}, which is on the host", step)

    def check_ended(self) -> None:
        """Refuse a copy that was never waited for."""
        if self.leaving or self.returning:
            raise InvalidPlan(f"the copy of value {min({*self.leaving, *self.returning})} is never waited for")
