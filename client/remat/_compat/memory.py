"""Memory: which storage holds a tensor, and the profiler without Kineto, which notes all that the CPU allocates."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch
from torch.autograd import profiler_legacy

from .versions import lacking, library, require

MARK = "remat: "

require(lacking((), ((torch.autograd, "_disable_profiler_legacy"), (torch.autograd, "_profiler_enabled"))))


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors share exactly when one storage holds both."""
    return id(tensor.untyped_storage())  # a storage keeps its Python object as long as it is there itself


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for several tensors at once, as `is_grads_batched` makes them: such a one has no storage."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


def recording() -> bool:
    """Whether a profiler, the caller's own perhaps, is at work in this thread that does not give way."""
    return _HERE.gives_way is None and bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


class _Here(threading.local):
    """Of this thread: what is called when its recording has to give way to another one; None: it does not give way."""

    gives_way: Callable[[], None] | None = None


_HERE = _Here()


class _Quiet:
    """Keeps torch's C++ log to errors while recordings run: it warns of blocks that are freed and were made before.

    The level is the process's, so that it counts how many recordings run. A build without it logs as it does.
    """

    ERROR = 2

    def __init__(self) -> None:
        self._lock, self._running, self._before = threading.Lock(), 0, 0
        try:
            self._level: ctypes.c_int | None = ctypes.c_int.in_dll(library("c10"), "FLAGS_caffe2_log_level")
        except (OSError, ValueError):
            self._level = None

    def add(self, more: int) -> None:
        """One recording more, or one less (-1)."""
        with self._lock:
            first, self._running = self._running == 0, self._running + more
            if self._level is None:
                return
            if first:
                self._before, self._level.value = self._level.value, max(self._level.value, self.ERROR)
            elif not self._running:
                self._level.value = self._before


_QUIET = _Quiet()


def start_recording(gives_way: Callable[[], None] | None = None) -> None:
    """Note all that this thread's CPU allocator does, until `stop_recording`: by the profiler without Kineto.

    Args:
        gives_way: called if another recording begins in this thread, which ends this one; None: none may.
    """
    before = _HERE.gives_way
    if before is not None:
        stop_marked_recording()
        before()
    _HERE.gives_way = gives_way
    _QUIET.add(1)
    profiler_legacy.profile(profile_memory=True).__enter__()  # type: ignore[no-untyped-call]


def stop_recording() -> list[int]:
    """Bytes allocated or (negative) freed on the CPU, in order."""
    return [event for event in stop_marked_recording() if isinstance(event, int)]


def stop_marked_recording() -> list[int | str]:
    """Bytes allocated or (negative) freed on the CPU and the marks set between them, in order."""
    _HERE.gives_way = None
    # leaving the profiler would drop what an op allocates and frees
    threads = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
    _QUIET.add(-1)
    start = next(record for records in threads for record in records)
    found: list[tuple[float, int | str]] = []
    for records in threads:
        for record in records:
            kind = str(record.kind())
            if kind == "memory_alloc" and record.cpu_memory_usage():
                found.append((start.cpu_elapsed_us(record), record.cpu_memory_usage()))
            elif kind == "push" and record.name().startswith(MARK):
                found.append((start.cpu_elapsed_us(record), record.name()[len(MARK) :]))
    # one thread's records are in order; several are merged by time
    return [event for _, event in (sorted(found, key=lambda f: f[0]) if len(threads) > 1 else found)]


def mark(text: str) -> None:
    """Leave a mark among the events that are being recorded."""
    with torch.autograd.profiler.record_function(MARK + text):
        pass
