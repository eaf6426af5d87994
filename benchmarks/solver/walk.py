"""The walk of one solve through the modules: `python -m benchmarks.solver.walk [INSTANCE]` prints what it enters.

Counted are the modules of `remat_solver` and `remat_ir` of which a function is called while `solve` runs, in all
threads of this process (engines are other processes); how often a call goes from one module to another; and how often
`auto` is called again from below itself.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from types import FrameType

from benchmarks.graphs.instances import instance
from benchmarks.harness.table import table
from remat_ir import Problem, budget_at
from remat_solver import solve
from remat_solver.kernels import loading

_PACKAGES = ("remat_solver", "remat_ir")
_AUTO = "remat_solver.methods.auto"


class Walk:
    """Calls of each module, changes from one module to another, and calls of `run_auto` from within `run_auto`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changes: Counter[tuple[str, str]] = Counter()
        self.again = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """What `sys.setprofile` calls."""
        if event != "call":
            return
        module = _module_of(frame)
        if module is None:
            return
        self.calls[module] += 1
        caller = frame.f_back
        before = None if caller is None else _module_of(caller)
        if before is not None and before != module:
            self.changes[before, module] += 1
        if frame.f_code.co_name == "run_auto" and module == _AUTO:
            while caller is not None and caller.f_code is not frame.f_code:
                caller = caller.f_back
            self.again += caller is not None


def walk(problem: Problem, seconds: float) -> Walk:
    """The walk of a solve with `auto`."""
    found = Walk()
    threading.setprofile(found.note)
    sys.setprofile(found.note)
    try:
        solve(problem, time_limit_s=seconds)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def _module_of(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__", "")
    return name if name.partition(".")[0] in _PACKAGES else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace, and print a line a module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("instance", nargs="?", default="unet-4-whole", help="of benchmarks.graphs.instances")
    parser.add_argument("--budget", type=float, default=0.5, help="as a share of the peak without a plan")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args(arguments)
    loading().wait()
    graph = instance(options.instance)
    found = walk(Problem(graph, budget_at(graph, options.budget)), options.seconds)
    into = Counter(module for _, module in found.changes.elements())
    rows = [(module, f"{calls}", f"{into[module]}") for module, calls in sorted(found.calls.items())]
    print(table(("module", "calls", "from another module"), rows))
    print(
        f"\n{options.instance}, {graph.ops} ops: {len(rows)} modules, {sum(found.changes.values())} changes of module"
    )
    print(f"auto called again from below itself: {found.again} times")
    return int(found.again > 0)


if __name__ == "__main__":
    sys.exit(main())
