"""The link between a device and its host: copies of storages out and back, one at a time in each direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .. import _compat
from ..device import Accelerator, of


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
    """An accelerator: pinned memory on the host, and a stream for each direction besides the one that computes.

    A storage is allocated and freed on the computing stream only. Before a copy out starts, what has been computed so
    far must have ended, and before a copy back starts, what last used the memory that it was given. `wait` makes the
    computing stream wait, so a storage that is freed after it is not reused before the copy has ended.
    """

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self._outward, self._homeward = device.side_streams()

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Copies, UnderWay]:
        """Copy on the outward stream, behind what has been issued on it."""
        hosts = [self.device.pinned(storage.nbytes()) for storage in storages]
        token = self._copy(self._outward, hosts, [as_bytes(storage) for storage in storages], storages)
        return Copies(tuple(hosts), sum(self.device.pinned_bytes(storage.nbytes()) for storage in storages)), token

    def back(self, copies: Copies) -> tuple[list[torch.UntypedStorage], UnderWay]:
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

    def wait(self, token: UnderWay) -> None:
        """The computing stream waits; the host does not."""
        token.end(self.device.computing_stream())


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
