"""The allocator's events of all threads: what a process group's own threads free is told to the open profiler.

A thread of gloo may be the last to let a tensor go, and the CPU's allocator tells only the profiler of the thread that
frees, so that the tensor would seem to stay.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from benchmarks.harness.native import library


def tell() -> None:
    """From now on in this process, and in those that are forked from it; torch's allocator does the rest as before.

    Raises:
        RuntimeError: there is no compiler.
    """
    here = Path(__file__).parent
    ctypes.CDLL(str(library(here / "threads.cpp", here))).install()
