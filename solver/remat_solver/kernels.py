"""Compiling every kernel before it is needed, in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from remat_ir import Chain, graph_of

from . import _numba
from .blocks.table import fill as fill_blocks
from .chain.table import Least, Table
from .deadline import never
from .join.table import JoinTable, contiguous_plan, relaxed_steps
from .offload.table import OffloadTable
from .search.local import HOT, Search
from .tags.search import TagSearch

_POLL_S = 0.05
_CHAIN = Chain(
    forward_ns=(1, 1, 1), backward_ns=(2, 2, 2), activation_bytes=(1, 1, 1, 1), gradient_bytes=(1, 1, 1, 1),
    tape_bytes=(2, 2, 2), forward_workspace_bytes=(0, 0, 0), backward_workspace_bytes=(0, 0, 0),
    link_bytes_per_s=10**9,
)  # fmt: skip

_log = logging.getLogger("remat.solver")
_loaded = threading.Event()


def _search() -> None:
    search = Search(graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]]), 2)
    search.adopt((0, 1, 0, 2))
    search.cycle(64, HOT, never)


def _blocks() -> None:
    near, many = np.zeros(2, np.int64), np.zeros((1, 1), np.int64)
    cost, first = np.zeros(2, np.int32), np.array([0, 1], np.int64)
    fill_blocks(
        0, 1, cost, near[:1], many, first, near[:1], cost[:1], near[:1], near[:1], near[:1], near[:1],
        np.empty((1, 4), np.int32),
    )  # fmt: skip


def _chains() -> None:
    Least(_CHAIN).plan()
    Table(_CHAIN, 8).plan(4)
    offload = OffloadTable(_CHAIN, 6, 8)
    offload.schedule()
    offload.tail(1, 2, 0, 0)


def _joins() -> None:
    JoinTable((2, 2), 5).plan(5)
    contiguous_plan((2, 2), 5, (False, False))
    relaxed_steps((2, 2), 5, (False, False))


def _tags() -> None:
    search = TagSearch(graph_of([1] * 4, [1] * 4, [[], [0], [1, 0], [2, 0]], backward_from=2), 3)
    search.evaluate((0,))
    search.try_all()
    search.cycle(4, never)


_HALVES = ((_search,), (_blocks, _chains, _joins, _tags))
"""What is compiled by a process each: the halves take about as long."""


def load_half(half: int) -> None:
    """Run every kernel of a half once on the smallest problem: compiled, or loaded from the cache."""
    for run in _HALVES[half]:
        run()


def load_all() -> None:
    """Run every kernel once on the smallest problem: compiled, or loaded from the cache.

    Raises:
        RuntimeError: one has not run: a bug here.
    """
    for half in range(len(_HALVES)):
        load_half(half)
    left = [made.py_func.__qualname__ for made in _numba.KERNELS if not made.signatures]
    if left:
        raise RuntimeError(f"kernels that nothing here runs: {', '.join(left)}")


def all_cached() -> bool:
    """Whether numba's cache holds every kernel, as its source is now, for this processor."""
    return all(map(_numba.cached, _numba.KERNELS))


def compile_apart(stopped: Callable[[], bool] = never) -> None:
    """Fill numba's cache by processes of their own, where it is not filled: this one's lock and memory stay free.

    Where no folder can be written there is nothing to fill, and each process compiles for itself.
    """
    if all_cached() or not all(map(_numba.writable, _numba.KERNELS)):
        return
    _log.warning(
        "compiling the solver's kernels, once for this installation: half a minute (`remat warm` does it ahead)"
    )
    root = str(Path(__file__).parents[1])  # where this package was found, whatever the new processes find by themselves
    script = f"import sys; sys.path.insert(0, {root!r}); from remat_solver.kernels import load_half; load_half"
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", f"{script}({half})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for half in range(len(_HALVES))
    ]
    try:
        for process in processes:
            said = None
            while said is None and not stopped():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, said = process.communicate(timeout=_POLL_S)
            if said is not None and process.returncode:
                _log.warning("the solver's kernels could not be compiled: %s", said.decode(errors="replace")[-2000:])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def loaded() -> bool:
    """Whether every kernel can run at once; asking does not load them."""
    return _loaded.is_set()


def load_for_forks(stopped: Callable[[], bool]) -> bool:
    """Load every kernel in this thread, for this process and all that it forks, which write no cache.

    Returns:
        False if `stopped` says so while they are compiled.
    """
    compile_apart(stopped)
    if stopped():
        return False
    load_all()
    _numba.write_no_cache()
    _loaded.set()
    return True


@cache
def loading() -> threading.Event:
    """Compile or load every kernel in a thread of its own; the event tells when that is over."""

    def load() -> None:
        try:
            compile_apart()
            load_all()
        except Exception:  # noqa: BLE001 – the first to use a kernel compiles it again, and raises what is wrong
            _log.warning("the solver's kernels could not be compiled ahead of their use", exc_info=True)
        finally:
            _loaded.set()

    threading.Thread(target=load, name="load-kernels", daemon=True).start()
    return _loaded


def await_kernels(stopped: Callable[[], bool]) -> bool:
    """Wait until every kernel can run; False if `stopped` says so before."""
    ready = loading()
    while not ready.wait(0.02):
        if stopped():
            return False
    return True
