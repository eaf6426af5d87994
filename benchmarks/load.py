"""Load on a running service: hits against a bare route, identical and distinct problems, kills and restarts.

`python -m benchmarks.load SCENARIO …` (`--help` names them) prints one table a scenario,
row by row, and appends it to `--out FILE`; ended by SIGTERM it keeps the rows that it had and leaves no process behind.
Each starts its own service on a free port with a temporary database; those from `scaling` on start PostgreSQL servers
of their own. Every answer's plan is verified on the problem as it was sent; a lost or wrong answer ends the run with
exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from benchmarks.service.alone import distinct, hits, identical, killed, misses
from benchmarks.service.burst import burst
from benchmarks.service.cluster import cluster, depth, scaling
from benchmarks.service.rows import rows


async def until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Some work; SIGTERM cancels it, so that what it has started is ended as after an exception."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def main() -> None:
    """Run the scenarios named, or all but those of a cluster."""
    scenarios = {
        f.__name__: f for f in (hits, misses, identical, distinct, killed, scaling, cluster, depth, burst, rows)
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", nargs="*", choices=[*scenarios, []], default=[])
    parser.add_argument("--out", type=Path, help="append the tables to this file, as Markdown")
    parser.add_argument("--ops", type=int, nargs="+", default=[300, 3000, 30000])
    parser.add_argument("--times", type=int, default=1000, help="requests at 300 ops; fewer at more")
    parser.add_argument("--misses", type=int, default=3000)
    parser.add_argument("--miss-ops", type=int, nargs="+", default=[24, 300], help="of `misses`")
    parser.add_argument("--identical", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between kills")
    parser.add_argument("--burst-jobs", type=int, default=100, help="misses of the minute of `burst`")
    parser.add_argument("--answers", type=int, default=1_250_000, help="of `rows`, eight rows each")
    parser.add_argument("--jobs", type=int, default=10_000, help="problems of `cluster`; a tenth of them for `scaling`")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.7], help="fractions, of `scaling`")
    options = parser.parse_args()
    for name in options.scenario or ["hits", "identical", "distinct", "killed"]:
        with tempfile.TemporaryDirectory(prefix="remat-load-") as folder:
            try:
                asyncio.run(until_terminated(scenarios[name](Path(folder), options)))
            except asyncio.CancelledError:
                raise SystemExit(128 + signal.SIGTERM) from None  # as a shell says it


if __name__ == "__main__":
    main()
