"""Small random programs with known answers, for the tests of the engines."""

from __future__ import annotations

from itertools import product

import numpy as np

from remat_solver.program import Builder, Program, Term


def random_program(seed: int, columns: int = 8, rows: int = 7) -> Program:
    """A binary program with covering rows, knapsacks of odd floats, an equality now and then, and duplicate entries."""
    random = np.random.default_rng(seed)
    builder = Builder()
    x = builder.variables(columns, cost=random.integers(-3, 20, columns))
    for _ in range(rows):
        some = random.choice(columns, size=int(random.integers(2, min(6, columns))), replace=False)
        zeros = np.zeros(len(some), dtype=int)
        kind = int(random.integers(0, 5))
        if kind <= 1:
            signs = random.choice([-1.0, 1.0], len(some))
            builder.add_rows(1, [Term(zeros, x[some], signs)], lower=float(random.integers(-1, 2)))
        elif kind == 2:
            weights = random.random(len(some))
            builder.add_rows(1, [Term(zeros, x[some], weights)], upper=float(weights.sum() * 0.6))
        elif kind == 3:
            builder.add_rows(1, [Term(zeros, x[some], 1.0), Term(zeros, x[some], 1.0)], lower=2.0, upper=6.0)
        else:
            builder.add_rows(1, [Term(zeros, x[some])], lower=1.0, upper=1.0)
    return builder.program(offset=float(random.integers(-5, 5)))


def brute_optimum(program: Program) -> float | None:
    """The optimum of a binary program by trying every point, None if there is none."""
    points = np.array(list(product((0.0, 1.0), repeat=program.columns)))
    ok = np.ones(len(points), dtype=bool)
    dense = np.zeros((program.rows, program.columns))
    for row in range(program.rows):
        entries = slice(program.row_start[row], program.row_start[row + 1])
        dense[row, program.row_index[entries]] = program.row_value[entries]
    activity = points @ dense.T
    ok &= np.all(activity >= program.row_lower - 1e-9, axis=1) & np.all(activity <= program.row_upper + 1e-9, axis=1)
    ok &= np.all(points >= program.lower, axis=1) & np.all(points <= program.upper, axis=1)
    if not ok.any():
        return None
    return float((points[ok] @ program.cost).min()) + program.offset


def hard_program(seed: int = 0, columns: int = 60, rows: int = 30) -> Program:
    """A market split program: tiny to write, far beyond what any engine proves in a minute."""
    random = np.random.default_rng(seed)
    builder = Builder()
    x = builder.variables(columns)
    slack = builder.variables(rows, cost=1.0, upper=1e6, integer=True)
    excess = builder.variables(rows, cost=1.0, upper=1e6, integer=True)
    weights = random.integers(0, 1000, (rows, columns))
    row, column = np.nonzero(weights)
    one = np.arange(rows)
    half = weights.sum(axis=1) // 2
    builder.add_rows(
        rows,
        [Term(row, x[column], weights[row, column]), Term(one, slack), Term(one, excess, -1.0)],
        lower=half,
        upper=half,
    )
    return builder.program()
