"""The figures of the Checkmate paper, measured again on the project's own graphs: one command each, written as CSV.

python -m benchmarks.figures tradeoff      overhead against budget (Figure 4)
python -m benchmarks.figures profiles      the same of captured networks, by measured costs and by a roofline
python -m benchmarks.figures trained       the plans of one of them, trained
python -m benchmarks.figures batches       the largest batch at one more forward pass (Figure 6)
python -m benchmarks.figures ratios        cost against the best known (Table 2 of the printed version)
python -m benchmarks.figures times         solve time against graph size
python -m benchmarks.figures draw          pictures and benchmarks/results/figures.md from the CSV files
python -m benchmarks.figures all
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.figures.draw import draw
from benchmarks.figures.measure import FOLDER, MEASURES, Settings, measure
from benchmarks.graphs.architectures import ARCHITECTURES
from remat_solver.methods import METHODS


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*MEASURES, "draw", "all"])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for CSV files and pictures")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of one solve")
    parser.add_argument("--points", type=int, default=10, help="budgets per network")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), help="measure only these")
    parser.add_argument(
        "--networks", nargs="+", type=str.lower, choices=sorted(ARCHITECTURES), help="measure only these"
    )
    given = parser.parse_args()
    methods, networks = (None if these is None else frozenset(these) for these in (given.methods, given.networks))
    for name in MEASURES:
        if given.what in (name, "all"):
            measure(name, given.out, Settings(given.seconds, given.points, methods, networks))
    draw(given.out)


if __name__ == "__main__":
    main()
