"""The link between a device and its host: how long its copies take, and what the host can hold."""

from __future__ import annotations

from dataclasses import dataclass

from .document import Document, Integer, Member, OfDocument

LINK = Document(
    "LinkDocument",
    "link",
    "The link to the host: a direction carries one copy at a time, both directions run next to compute.",
    {
        "to_host_bytes_per_s": Member(Integer(least=1)),
        "to_device_bytes_per_s": Member(Integer(least=1)),
        "latency_ns": Member(Integer(), 0, "What each copy takes besides its bytes.", sparse=True),
        "host_bytes": Member(
            Integer(), None, "What the host can hold; null without a limit.", nullable=True, sparse=True
        ),
    },
)


@dataclass(frozen=True)
class Link(OfDocument):
    """A link to the host, each direction with a bandwidth of its own.

    Attributes:
        to_host_bytes_per_s, to_device_bytes_per_s: bandwidth of copies out and of copies back.
        latency_ns: what each copy takes besides its bytes.
        host_bytes: what the host can hold, or None without a limit.

    Raises:
        InvalidData: a number is out of range.

    >>> Link(10**9, 2 * 10**9, latency_ns=5).to_host_ns(100)
    105
    """

    document = LINK

    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    latency_ns: int = 0
    host_bytes: int | None = None

    def to_host_ns(self, size_bytes: int) -> int:
        """How long a copy out takes: the latency, and its bytes over the bandwidth, rounded up to whole ns."""
        return self.latency_ns - (-size_bytes * 1_000_000_000 // self.to_host_bytes_per_s)

    def to_device_ns(self, size_bytes: int) -> int:
        """How long a copy back takes."""
        return self.latency_ns - (-size_bytes * 1_000_000_000 // self.to_device_bytes_per_s)
