"""The figures of the papers, measured again on the project's own graphs: one command each, written as CSV.

python -m benchmarks.figures tradeoff      overhead against budget (Checkmate, Figure 4)
python -m benchmarks.figures profiles      the same of captured networks, by measured costs and by a roofline
python -m benchmarks.figures trained       the plans of one of them, trained
python -m benchmarks.figures batches       the largest batch at one more forward pass (Figure 6)
python -m benchmarks.figures ratios        cost against the best known (Table 2 of the printed version)
python -m benchmarks.figures times         solve time against graph size
python -m benchmarks.figures draw          benchmarks/results/figures.md and docs/papers.md from the CSV files
python -m benchmarks.figures all

Each piece stands in the CSV file once it is measured, and a run that was stopped goes on with the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.figures import claims
from benchmarks.figures.draw import draw
from benchmarks.figures.measure import FOLDER, MEASURES, Settings, run_piece, run_pieces
from benchmarks.graphs.architectures import ARCHITECTURES
from remat_solver.methods import METHODS


def main() -> None:
    """The command line."""
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*MEASURES, "draw", "all"])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for CSV files and pictures")
    parser.add_argument("--since", default="", metavar="DATE", help="run again what was measured before, as 2026-01-31")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="time limit of one solve by auto")
    parser.add_argument("--program-seconds", type=float, default=usual.program_s, help="of the paper's program")
    parser.add_argument("--long-seconds", type=float, default=usual.long_s, help="of the same for ResNet50")
    parser.add_argument("--points", type=int, default=usual.points, help="budgets per network")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), help="measure only these")
    parser.add_argument(
        "--networks", nargs="+", type=str.lower, choices=sorted(ARCHITECTURES), help="measure only these"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing that could end later")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    given = parser.parse_args()
    methods, networks = (None if these is None else frozenset(these) for these in (given.methods, given.networks))
    plan = Settings(given.seconds, given.points, methods, networks, given.program_seconds, given.long_seconds)
    if given.piece is not None:
        run_piece(given.what, given.piece, given.out, plan)
        return
    names = [name for name in MEASURES if given.what in (name, "all")]
    until = time.monotonic() + 60 * given.minutes
    whole = run_pieces(names, given.out, plan, sys.argv[2:], until, given.since)
    draw(given.out)
    if given.out == FOLDER:
        claims.PAGE.write_text(claims.page(claims.SOURCE.read_text(), FOLDER))
    if not whole:
        raise SystemExit("not all pieces are there yet: the same command goes on")


if __name__ == "__main__":
    main()
