"""The stand-in in this process: `install()` before torch is imported, then devices cuda:0 and cuda:1 are there.

torch asks for CUDA's hooks once, while it is imported, so that the library is loaded before. What Python's `torch.cuda`
asks of a build with CUDA is answered here: the functions that the client, torch's own training code and the tests call.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from .build import library

_library: Any = None

SPARE = 2
"""An allocator of no device, whose policy is tested."""


def loaded() -> bool:
    """Whether this process has the stand-in."""
    return _library is not None


def install() -> None:
    """Build the library if need be, load it, import torch, and answer for `torch.cuda`.

    Raises:
        RuntimeError: torch is imported already, or the library cannot be built.
    """
    global _library
    if _library is not None:
        return
    if "torch" in sys.modules:
        raise RuntimeError("the stand-in must be installed before torch is imported")
    _library = ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
    _library.standin_stream.restype = _library.standin_blocks.restype = ctypes.c_int64
    _library.standin_allocate.restype = ctypes.c_void_p
    from . import module

    module.install(_library)


class Figures(tuple[int, ...]):
    """Bytes of a device: allocated, requested and reserved, each now and at most since the peaks were forgotten."""

    allocated, peak_allocated = property(lambda self: self[0]), property(lambda self: self[1])
    requested, peak_requested = property(lambda self: self[2]), property(lambda self: self[3])
    reserved, peak_reserved = property(lambda self: self[4]), property(lambda self: self[5])


def figures(device: int = 0) -> Figures:
    """What the allocator of a device has counted."""
    found = (ctypes.c_int64 * 6)()
    _library.standin_figures(device, found)
    return Figures(found)


def forget_peaks(device: int = 0) -> None:
    """From now on the peaks are those of what follows."""
    _library.standin_forget_peaks(device)


class Block(NamedTuple):
    """A block of a segment: where both begin, bytes, what was asked for (None: it is free), and where it belongs."""

    segment: int
    address: int
    size: int
    requested: int | None
    stream: int
    small: bool
    expandable: bool


def blocks(device: int = 0) -> list[Block]:
    """All blocks of a device, those of a segment in order."""
    room = int(_library.standin_blocks(device, None, ctypes.c_int64(0)))
    found = (ctypes.c_int64 * (8 * room))()
    assert _library.standin_blocks(device, found, ctypes.c_int64(room)) == room
    rows = [found[8 * i : 8 * i + 7] for i in range(room)]
    return [Block(r[0], r[1], r[2], None if r[3] < 0 else r[3], r[4], bool(r[5]), bool(r[6])) for r in rows]


def generator_is_fresh(device: int = 0) -> bool:
    """Whether the device's generator was seeded or set since this was asked."""
    return bool(_library.standin_generator_is_fresh(device))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """The computing stream is being captured: whoever waits or sets a generator fails."""
    _library.standin_capture(True)
    try:
        yield
    finally:
        _library.standin_capture(False)


def empty_cache() -> None:
    """Give back segments of which nothing is in use."""
    _library.standin_empty_cache()


def allocate(size: int, device: int = SPARE) -> int | None:
    """A block's address, or None: the limit is reached."""
    found: int | None = _library.standin_allocate(device, ctypes.c_int64(size))
    return found


def release(block: int | None, device: int = SPARE) -> None:
    """A block is free."""
    _library.standin_release(device, ctypes.c_void_p(block))


@contextlib.contextmanager
def lazy_streams(on: bool) -> Iterator[None]:
    """Copies on side streams run when they are waited for; or else at once."""
    _library.standin_synchronize()
    _library.standin_lazy(on)
    try:
        yield
    finally:
        _library.standin_synchronize()
        _library.standin_lazy(True)


@contextlib.contextmanager
def limited(size: int, device: int = 0) -> Iterator[None]:
    """The device has no more memory than that."""
    _library.standin_limit(device, ctypes.c_int64(size))
    try:
        yield
    finally:
        _library.standin_limit(device, ctypes.c_int64(2**62))


@contextlib.contextmanager
def expandable_segments() -> Iterator[None]:
    """Segments grow at their end; nothing is in the cache when this begins or ends."""
    empty_cache()
    _library.standin_expandable(True)
    try:
        yield
    finally:
        empty_cache()
        _library.standin_expandable(False)


@contextlib.contextmanager
def library_workspace(size: int) -> Iterator[None]:
    """Each thread that multiplies matrices takes so many bytes until this ends, as a library's handle does for good."""
    _library.standin_library_workspace(ctypes.c_int64(size))
    try:
        yield
    finally:
        _library.standin_library_workspace(ctypes.c_int64(0))


@contextlib.contextmanager
def cudnn() -> Iterator[None]:
    """torch believes that this build has cuDNN."""
    _library.standin_cudnn(True)
    try:
        yield
    finally:
        _library.standin_cudnn(False)
