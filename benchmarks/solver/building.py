"""How long it takes to write the programs, in arrays and through PuLP: `python -m benchmarks.solver.building`."""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pulp

from benchmarks.harness.table import head, row
from benchmarks.solver.cases import CASES, problem_of
from remat_ir import Problem
from remat_solver.array_view import view_of
from remat_solver.formulate.checkmate import checkmate
from remat_solver.formulate.tight import tight
from remat_solver.program import Program
from remat_solver.staged.rows import Rows, write
from remat_solver.staged.scale import scale_of

T = TypeVar("T")
_CUTS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row per program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.building", description=__doc__)
    parser.add_argument("--instances", nargs="+", default=["made-unet@0.5", "made-rt250@0.5"])
    parser.add_argument("--no-pulp", action="store_true", help="leave the modelling layer out")
    options = parser.parse_args(arguments)
    print(head(("instance", "ops", "program", "columns", "rows", "entries", "arrays, CPU s", "PuLP, CPU s")))
    for case in CASES:
        if case.key not in options.instances:
            continue
        problem = problem_of(case, ())
        for name, build in _BUILDS:
            program, seconds = _timed(partial(build, problem))
            slow = "–" if options.no_pulp else f"{_timed(partial(_modelled, program))[1]:.2f}"
            size = (program.columns, program.rows, len(program.row_value))
            print(row((case.key, problem.graph.ops, name, *size, f"{seconds:.2f}", slow)), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nMost memory of this process: {peak:.1f} GiB.")
    return 0


def _paper(problem: Problem) -> Program:
    return checkmate(view_of(problem)).program


def _tight(problem: Problem) -> Program:
    return tight(view_of(problem)).program


def _staged(problem: Problem) -> Program:
    view = view_of(problem)
    last = view.ops - 1
    first = min(max(0, view.tight_from - 1), last)
    cuts = {first + (last - first) * c // _CUTS for c in range(_CUTS + 1)}
    return write(view, Rows(cuts), scale_of(view)).program


_BUILDS: tuple[tuple[str, Callable[[Problem], Program]], ...] = (
    ("`milp`", _paper),
    ("`milp-tight`", _tight),
    (f"`staged`, {_CUTS} cuts", _staged),
)


def _modelled(program: Program) -> pulp.LpProblem:
    """The same program as a modelling layer holds it: one object per variable and per row."""
    model = pulp.LpProblem("program", pulp.LpMinimize)
    kinds = ["Integer" if whole else "Continuous" for whole in program.integer.tolist()]
    columns = [
        pulp.LpVariable(f"x{i}", low, None if high == float("inf") else high, kind)
        for i, (low, high, kind) in enumerate(zip(program.lower.tolist(), program.upper.tolist(), kinds, strict=True))
    ]
    model += pulp.LpAffineExpression([(columns[i], c) for i, c in enumerate(program.cost.tolist()) if c])
    start, index, value = program.row_start.tolist(), program.row_index.tolist(), program.row_value.tolist()
    for number, (low, high) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
        entries = range(start[number], start[number + 1])
        terms = pulp.LpAffineExpression([(columns[index[e]], value[e]) for e in entries])
        if low == high:
            model += terms == low
            continue
        if high != float("inf"):
            model += terms <= high
        if low != -float("inf"):
            model += terms >= low
    return model


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    gc.collect()
    began = time.process_time()
    made = work()
    return made, time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
