"""The link between a device and its host: copies of storages out and back, one at a time in each direction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..profiling.timing import rounded


class Copies(NamedTuple):
    """Copies on the host of some storages, in order."""

    hosts: tuple[torch.Tensor, ...]
    size_bytes: int


class Link(Protocol):
    """How storages go to the host and come back; `wait` takes what `out` or `back` gave for a token."""

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Copies, Any]:
        """Start copies to the host; the storages must live until the token has been waited for."""
        ...

    def back(self, copies: Copies) -> tuple[list[torch.UntypedStorage], Any]:
        """Start copies into new storages on the device, which may be read once the token has been waited for."""
        ...

    def wait(self, token: Any) -> None:
        """Let nothing that is computed from now on run before the transfer has ended."""
        ...


class CopyingLink:
    """A host that is no other memory than the CPU's: plain copies, done at once.

    Host copies lie in Python's memory, not in that of torch's allocator: what torch allocates on the CPU is what the
    device would hold, byte for byte, and is freed and allocated by the same steps of a plan.
    """

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Copies, Any]:
        """Copy now."""
        hosts = []
        for storage in storages:
            host = torch.frombuffer(bytearray(max(1, storage.nbytes())), dtype=torch.uint8)[: storage.nbytes()]
            hosts.append(host.copy_(as_bytes(storage)))
        return Copies(tuple(hosts), sum(storage.nbytes() for storage in storages)), None

    def back(self, copies: Copies) -> tuple[list[torch.UntypedStorage], Any]:
        """Copy now."""
        return [torch.empty_like(host).copy_(host).untyped_storage() for host in copies.hosts], None

    def wait(self, token: Any) -> None:
        """Nothing is under way."""


class StreamLink:
    """CUDA: pinned memory on the host, and a stream for each direction beside the one that computes.

    A storage is allocated and freed on the computing stream only. Before a copy out starts, what has been computed so
    far must have ended, and before a copy back starts, what last used the memory that it was given. `wait` makes the
    computing stream wait, so a storage that is freed after it is not reused before the copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._homeward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Copies, Any]:
        """Copy on the outward stream, behind what has been issued on it."""
        hosts = [torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True) for storage in storages]
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            for host, storage in zip(hosts, storages, strict=True):
                host.copy_(as_bytes(storage), non_blocking=True)
            event = self._outward.record_event()
        return Copies(tuple(hosts), sum(storage.nbytes() for storage in storages)), event

    def back(self, copies: Copies) -> tuple[list[torch.UntypedStorage], Any]:
        """Copy on the homeward stream, into memory that the computing stream allocates."""
        found = [torch.empty(host.numel(), dtype=torch.uint8, device=self.device) for host in copies.hosts]
        self._homeward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._homeward):
            for device, host in zip(found, copies.hosts, strict=True):
                device.copy_(host, non_blocking=True)
            event = self._homeward.record_event()
        return [tensor.untyped_storage() for tensor in found], event

    def wait(self, token: Any) -> None:
        """The computing stream waits; the host does not."""
        torch.cuda.current_stream(self.device).wait_event(token)


def link_of(device: torch.device) -> Link:
    """The link of a device to its host."""
    return StreamLink(device) if device.type == "cuda" else CopyingLink()


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes, which shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def bandwidth(device: torch.device, sizes: Sequence[int] = (2**20, 2**24, 2**26)) -> int:
    """Bytes per second that a link carries out and back, the slower of both, at the best of a few sizes.

    Rounded as times are, so that jobs on equal machines ask about equal problems.
    """
    link, best = link_of(device), 0.0
    for size in sizes:
        storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        slower = 0.0
        copies: Copies | None = None
        for _ in range(4):
            start = _now(device)
            copies, token = link.out([storage])
            link.wait(token)
            middle = _now(device)
            _, token = link.back(copies)
            link.wait(token)
            slower = max(slower, min(size / max(1, middle - start), size / max(1, _now(device) - middle)))
        best = max(best, slower)
    return max(1, rounded(best * 1e9))


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()
