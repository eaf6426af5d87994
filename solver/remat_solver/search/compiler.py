"""The thread in which the search is compiled before anybody needs it."""

from __future__ import annotations

import logging
import threading
from functools import cache

from remat_ir import graph_of

from ..incumbent import Incumbent
from .local import Search
from .temperatures import COLD, HOT

_log = logging.getLogger("remat.solver")
_compiled = threading.Event()


@cache
def compiling() -> threading.Event:
    """Compile the search in a thread of its own, or load it from numba's cache; the event tells when that is over."""

    def compile_all() -> None:
        try:
            search = Search(graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]]), 2)
            search.adopt((0, 1, 0, 2))
            search.step(64, HOT, COLD)
        except Exception:  # nobody waits in vain: the first search compiles again, and raises what is the matter
            _log.warning("the search could not be compiled ahead of its use", exc_info=True)
        finally:
            _compiled.set()

    threading.Thread(target=compile_all, name="compile-search", daemon=True).start()
    return _compiled


def is_compiled() -> bool:
    """Whether the search can run at once; asking does not start the compiler."""
    return _compiled.is_set()


def await_compiled(incumbent: Incumbent) -> bool:
    """Wait for the compiler; False if the incumbent says stop before it is done."""
    ready = compiling()
    while not ready.wait(0.02):
        if incumbent.stopped():
            return False
    return True
