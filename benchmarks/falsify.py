"""Look for bounds that are wrong: `python -m benchmarks.falsify` ends with 1 where it finds one, its instance written.

Stored graphs with what is known about them, and graphs, chains and joins drawn at random, are solved by every method
and engine that takes them, under several budgets each. Every bound that is reported on the way is compared with every
plan of its space, under all budgets that it holds for; so what one engine proves is compared with what others find.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.solver.falsifier import Falsifier
from remat_solver.kernels import loading


def main(arguments: Sequence[str] | None = None) -> int:
    """Search until the time is over; 1 where something is contradicted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.falsify", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of it")
    parser.add_argument("--solve", type=float, default=2.0, help="seconds for each solve")
    parser.add_argument("--seed", type=int, default=0, help="of the problems that are drawn")
    parser.add_argument("--graphs", nargs="+", default=[], metavar="DIR", help="folders of more remat-graph files")
    parser.add_argument("--most-ops", type=int, default=400, help="larger stored graphs are left out")
    parser.add_argument("--instances", type=Path, default=Path("falsified"), help="where contradictions are written")
    options = parser.parse_args(arguments)
    loading().wait()  # before the time begins: a first run on a machine compiles the search for a minute
    falsifier = Falsifier(options.seconds, options.solve, options.seed, options.instances)
    falsifier.run([Path(folder) for folder in options.graphs], options.most_ops)
    print(falsifier.summary())
    return 1 if falsifier.found else 0


if __name__ == "__main__":
    sys.exit(main())
