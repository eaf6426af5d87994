"""The stand-in in this process: `install()` before torch is imported, then devices cuda:0 and cuda:1 are there.

torch asks for CUDA's hooks once, while it is imported, so that the library is loaded before. What Python's `torch.cuda`
asks of a build with CUDA is answered here: the functions that the client, torch's own training code and the tests call.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import native

HERE = Path(__file__).parent

_library: Any = None

SPARE = 2
"""An allocator of no device, whose policy is tested."""


def library(folder: Path = HERE) -> Path:
    """The shared library, built in a folder if it is not there: once for each state of its sources, 12 s on one core.

    Raises:
        RuntimeError: there is no compiler, or it refuses the sources.
    """
    source = HERE / "native" / "standin.cpp"
    headers = sorted(source.parent.glob("*.h"))
    return native.library(source, folder, headers, "include/torch/csrc/api/include", ("c10", "torch_cpu"))


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

    allocated = property(lambda self: self[0])
    requested = property(lambda self: self[2])
    reserved = property(lambda self: self[4])


def figures(device: int = 0) -> Figures:
    """What the allocator of a device has counted."""
    found = (ctypes.c_int64 * 6)()
    _library.standin_figures(device, found)
    return Figures(found)


def forget_peaks(device: int = 0) -> None:
    """From now on the peaks are those of what follows."""
    _library.standin_forget_peaks(device)


def segments(device: int = 0) -> list[dict[str, Any]]:
    """All segments of a device with their blocks in order, as `torch.cuda.memory_snapshot` has them."""
    room = int(_library.standin_blocks(device, None, ctypes.c_int64(0)))
    found = (ctypes.c_int64 * (8 * room))()
    assert _library.standin_blocks(device, found, ctypes.c_int64(room)) == room
    made: dict[int, dict[str, Any]] = {}
    for i in range(room):
        first, address, size, requested, stream, small, expandable = found[8 * i : 8 * i + 7]
        kind = {"segment_type": "small" if small else "large", "is_expandable": bool(expandable)}
        segment = made.setdefault(
            first, {"device": device, "address": first, "stream": stream, "total_size": 0, "blocks": [], **kind}
        )
        state = "inactive" if requested < 0 else "active_allocated"
        segment["total_size"] += size
        segment["blocks"].append(
            {"address": address, "size": size, "requested_size": max(0, requested), "state": state}
        )
    return list(made.values())


def generator_is_fresh(device: int = 0) -> bool:
    """Whether the device's generator was seeded or set since this was asked."""
    return bool(_library.standin_generator_is_fresh(device))


@contextlib.contextmanager
def _switched(switch: Callable[[Any], object], on: object, off: object) -> Iterator[None]:
    """A switch of the library, on until this ends."""
    switch(on)
    try:
        yield
    finally:
        switch(off)


def capturing() -> contextlib.AbstractContextManager[None]:
    """The computing stream is being captured: whoever waits or sets a generator fails."""
    return _switched(_library.standin_capture, True, False)


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


def limited(size: int, device: int = 0) -> contextlib.AbstractContextManager[None]:
    """The device has no more memory than that."""
    return _switched(partial(_library.standin_limit, device), ctypes.c_int64(size), ctypes.c_int64(2**62))


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


def library_workspace(size: int) -> contextlib.AbstractContextManager[None]:
    """Each thread that multiplies matrices takes so many bytes until this ends, as a library's handle does for good."""
    return _switched(_library.standin_library_workspace, ctypes.c_int64(size), ctypes.c_int64(0))


def cudnn() -> contextlib.AbstractContextManager[None]:
    """torch believes that this build has cuDNN."""
    return _switched(_library.standin_cudnn, True, False)
