"""The link between a device and its host: copies of storages out and back, and how much it carries, measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

import remat_ir

from .. import _compat
from ..device import Accelerator, of
from ..planning.budget import bytes_of
from ..planning.coordinator import Coordinator
from ..planning.links import read_link
from ..planning.options import SolveOptions
from ..profiling.timing import rounded


class Place(NamedTuple):
    """How a tensor lies in its storage, and whether it is the conjugate or the negative of what lies there."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Where a tensor lies."""
        lies = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return cls(*lies, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies there in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        made = empty.set_(storage, self.offset, self.size, self.stride)
        made = made.conj() if self.conjugate else made
        return _compat.negative_view(made) if self.negative else made


class Copies(NamedTuple):
    """Copies on the host of some storages, in order, and the bytes that the host gives for them."""

    hosts: tuple[torch.Tensor, ...]
    size_bytes: int


class CopyingLink:
    """A host that is no other memory than the CPU's: plain copies, done at once.

    Host copies lie in Python's memory, not in that of torch's allocator: what torch allocates on the CPU is what the
    device would hold, byte for byte, and is freed and allocated by the same steps of a plan.
    """

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Copies, UnderWay | None]:
        """Copy now."""
        hosts = []
        for storage in storages:
            host = torch.frombuffer(bytearray(max(1, storage.nbytes())), dtype=torch.uint8)[: storage.nbytes()]
            hosts.append(host.copy_(as_bytes(storage)))
        return Copies(tuple(hosts), sum(storage.nbytes() for storage in storages)), None

    def back(self, copies: Copies) -> tuple[list[torch.UntypedStorage], UnderWay | None]:
        """Copy now."""
        return [torch.empty_like(host).copy_(host).untyped_storage() for host in copies.hosts], None

    def wait(self, token: UnderWay | None) -> None:
        """Nothing is under way."""


class StreamLink:
    """An accelerator: pinned memory on the host, and a stream for each direction besides the one that computes.

    A storage is allocated and freed on the computing stream only. Before a copy out starts, what has been computed so
    far must have ended, and before a copy back starts, what last used the memory that it was given. `wait` makes the
    computing stream wait, so a storage that is freed after it is not reused before the copy has ended.
    """

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self._outward, self._homeward = device.side_streams()

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Copies, UnderWay | None]:
        """Copy on the outward stream, behind what has been issued on it."""
        hosts = [self.device.pinned(storage.nbytes()) for storage in storages]
        token = self._copy(self._outward, hosts, [as_bytes(storage) for storage in storages], storages)
        return Copies(tuple(hosts), sum(self.device.pinned_bytes(storage.nbytes()) for storage in storages)), token

    def back(self, copies: Copies) -> tuple[list[torch.UntypedStorage], UnderWay | None]:
        """Copy on the homeward stream, into memory that the computing stream allocates."""
        made = [torch.empty(host.numel(), dtype=torch.uint8, device=self.device.device) for host in copies.hosts]
        storages = [tensor.untyped_storage() for tensor in made]
        return storages, self._copy(self._homeward, made, copies.hosts, storages)

    def _copy(
        self,
        stream: Any,
        into: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        storages: Sequence[torch.UntypedStorage],
    ) -> UnderWay:
        computing = self.device.computing_stream()
        stream.wait_stream(computing)
        token = UnderWay(computing, stream, storages)
        with self.device.inside(stream):
            for to, source in zip(into, sources, strict=True):
                to.copy_(source, non_blocking=True)
        token.event = stream.record_event()
        return token

    def wait(self, token: UnderWay | None) -> None:
        """The computing stream waits; the host does not."""
        if token is not None:
            token.end(self.device.computing_stream())


Link: TypeAlias = CopyingLink | StreamLink
"""How storages go to the host and come back. Those that `out` copies must live until `wait` has been given the token
that it gave, and those that `back` gives may be read once it has."""


class UnderWay:
    """Copies that a side stream was given, and the device's storages that they read or write.

    Where nobody waits for them, since a step failed or its loss was dropped, the storages live until the computing
    stream that allocated them waits: freed without that, their memory would be used again while a copy writes it.

    Attributes:
        event: reached when the copies have ended; None while they are being issued.
    """

    def __init__(self, computing: Any, stream: Any, storages: Sequence[torch.UntypedStorage]) -> None:
        self._computing, self._stream, self._storages = computing, stream, tuple(storages)
        self.event: Any = None

    def end(self, computing: Any) -> None:
        """A computing stream waits for the copies."""
        if self.event is None:
            computing.wait_stream(self._stream)
        else:
            computing.wait_event(self.event)
        self._storages = ()

    def __del__(self) -> None:
        if self._storages:
            self.end(self._computing)


def link_of(device: torch.device) -> Link:
    """The link of a device to its host."""
    there = of(device)
    return StreamLink(there) if isinstance(there, Accelerator) else CopyingLink()


def storable(device: torch.device, host_bytes: int | None) -> int | None:
    """What may be stored in so many bytes of the host, or None without a limit: pinned blocks take up to twice that."""
    return host_bytes if host_bytes is None or not isinstance(of(device), Accelerator) else host_bytes // 2


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes, which shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


SIZES = (2**20, 2**24, 2**26)
REPETITIONS = 4


class LinkFigures(NamedTuple):
    """Bytes a second out, back, and each way while the other is at work too, and ns that the smallest copy takes."""

    out: int
    back: int
    together: int
    latency_ns: int

    def link(self) -> remat_ir.Link:
        """The link for a plan, whose copies run both ways at once: the slower of both figures each way."""
        out, back = min(self.out, self.together), min(self.back, self.together)
        return remat_ir.Link(out, back, latency_ns=self.latency_ns)


@cache
def measured_link(device: torch.device, sizes: Sequence[int] = SIZES) -> LinkFigures:
    """The figures of a device's link, measured once: each the best of some sizes and repetitions, rounded as times are.

    On a CPU a copy is one of the process's own: nothing runs next to it.
    """
    best = [1.0, 1.0, 1.0]
    for size in sizes:
        for _ in range(REPETITIONS):
            best = [max(pair) for pair in zip(best, (size / ns for ns in _timed(device, size)), strict=True)]
    latency = min(min(_timed(device, 1)[:2]) for _ in range(REPETITIONS))
    out, back, together = (max(1, rounded(figure * 1e9)) for figure in best)
    return LinkFigures(out, back, together, rounded(latency))


def _timed(device: torch.device, size: int) -> tuple[int, int, int]:
    """How long a copy of so many bytes takes out, back, and both at once, in ns."""
    link, there = link_of(device), of(device)
    storage, other = (torch.empty(size, dtype=torch.uint8, device=device).untyped_storage() for _ in range(2))

    def now() -> int:
        there.synchronize()
        return time.perf_counter_ns()

    start = now()
    copies, token = link.out([storage])
    link.wait(token)
    middle = now()
    _, token = link.back(copies)
    link.wait(token)
    end = now()
    _, leaving = link.out([other])
    _, returning = link.back(copies)
    link.wait(leaving)
    link.wait(returning)
    last = now()
    return max(1, middle - start), max(1, end - middle), max(1, last - end)


def bandwidth(device: torch.device) -> int:
    """Bytes per second that a link carries out and back, the slower of both, one way at a time."""
    found = measured_link(device)
    return min(found.out, found.back)


def link_for(options: SolveOptions, device: torch.device, coordinator: Coordinator) -> remat_ir.Link | None:
    """The link that options mean for a step on a device, the same numbers in every process of the job.

    The host's limit is lowered by what pinned blocks may take beyond what is stored in them.
    """
    if options.link is None:
        return None
    link = read_link(options.link)
    if link is None:
        figures = coordinator.costs({"link": measured_link(of(device).device)})
        link = LinkFigures(*figures["link"]).link()
    limit = link.host_bytes if options.host_bytes is None else bytes_of(options.host_bytes)
    return replace(link, host_bytes=storable(device, limit))
