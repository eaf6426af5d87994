"""By how much solves overrun their time limits: `python -m benchmarks.solver.limits` prints the worst of each method.

Each method takes each instance at a budget that no plan fits, one that is tight and one that is not, under each limit.
What may be over is 0.2 s up to 1,000 ops, 0.5 s up to 10,000, 1.5 s beyond, or 5 % of the limit where that is more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.graphs.instances import instance
from benchmarks.harness.table import Report
from remat_ir import Problem, plain_peak
from remat_solver import solve
from remat_solver.bounds import least_need
from remat_solver.kernels import loading
from remat_solver.methods import METHODS

_LIMITS_S = (0.2, 1.0, 5.0, 10.0)
_INSTANCES = ("densenet-24", "gpt-24", "gpt-160", "gpt-1000")
_ALLOWED_S = ((1_000, 0.2), (10_000, 0.5))
_ALLOWED_BEYOND_S, _ALLOWED_SHARE = 1.5, 0.05
_COLUMNS = ("instance", "ops", "method", "over s", "allowed s", "limit s", "budget")


def allowed_s(ops: int, limit_s: float) -> float:
    """Seconds that a solve of so many ops may take beyond its limit."""
    seconds = next((seconds for most, seconds in _ALLOWED_S if ops <= most), _ALLOWED_BEYOND_S)
    return max(seconds, _ALLOWED_SHARE * limit_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line a method, the worst of it; exit code 1 where one is over what is allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", nargs="*", help="names of benchmarks.graphs.instances")
    parser.add_argument("--methods", nargs="*", help="of these alone")
    parser.add_argument("--limits", nargs="*", type=float, help="seconds")
    options = parser.parse_args(arguments)
    loading().wait()
    failed = False
    with Report("Beyond the time limit", _COLUMNS, None, "highspy", "numba", "numpy") as report:
        for name in options.instances or _INSTANCES:
            graph = instance(name)
            least, most = least_need(graph)[0], plain_peak(graph)
            budgets = {"hopeless": least - 1, "tight": least + (most - least) // 50, "feasible": (least + most) // 2}
            for method in options.methods or [m.name for m in METHODS.values() if "graph" in m.takes and not m.linked]:
                found = []
                for limit in options.limits or _LIMITS_S:
                    for what, budget in budgets.items():
                        began = time.monotonic()
                        solve(Problem(graph, budget), method=method, time_limit_s=limit, max_gap=0)
                        over = time.monotonic() - began - limit
                        found.append((over / allowed_s(graph.ops, limit), over, limit, what))
                share, over, limit, what = max(found)
                failed |= share > 1
                allowed = f"{allowed_s(graph.ops, limit):.2f}"
                report.add(name, graph.ops, method, f"{over:+.2f}", allowed, f"{limit:g}", what)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
