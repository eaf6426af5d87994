"""A program as free-form MPS and as CPLEX LP text, with numbers that read back exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..program import INFINITY, Program

_PER_LINE = 8


def mps(program: Program, names: Sequence[str] | None = None, comments: Sequence[str] = ()) -> str:
    """Free-form MPS; a constant of the objective stands on its right side, negated, as the format has it.

    Args:
        names: [columns] names without blanks; C0, C1, … where there are none. Rows are r0, r1, ….

    >>> from remat_solver.program import Builder, Term
    >>> builder = Builder()
    >>> x = builder.variables(2, cost=[1.0, 2.0])
    >>> builder.add_rows(1, [Term(0, x, 1.0)], lower=1.0)
    >>> print(mps(builder.program(), names=["x", "y"]), end="")
    NAME remat FREE
    ROWS
     N COST
     G r0
    COLUMNS
     M0 'MARKER' 'INTORG'
     x COST 1.0
     x r0 1.0
     y COST 2.0
     y r0 1.0
     MEND 'MARKER' 'INTEND'
    RHS
     RHS r0 1.0
    RANGES
    BOUNDS
     LO BOUND x 0.0
     UP BOUND x 1.0
     LO BOUND y 0.0
     UP BOUND y 1.0
    ENDATA
    """
    return "\n".join([*(f"* {line}" for line in comments), *_mps_lines(program, _named(program, names)), ""])


def _mps_lines(program: Program, names: Sequence[str]) -> Iterator[str]:
    lower, upper = program.row_lower, program.row_upper
    kinds = np.where(
        lower == upper, "E", np.where(np.isfinite(upper), "L", np.where(np.isfinite(lower), "G", "N"))
    ).tolist()
    yield from ("NAME remat FREE", "ROWS", " N COST")
    yield from (f" {kind} r{row}" for row, kind in enumerate(kinds))
    yield "COLUMNS"
    row_of = np.repeat(np.arange(program.rows), np.diff(program.row_start))
    order = np.argsort(program.row_index, kind="stable")
    by_column = np.searchsorted(program.row_index[order], np.arange(program.columns + 1)).tolist()
    rows, values = row_of[order].tolist(), program.row_value[order].tolist()
    integer, cost = program.integer.tolist(), program.cost.tolist()
    marked = False
    for column, name in enumerate(names):
        if integer[column] != marked:
            marked = integer[column]
            yield f" M{column} 'MARKER' '{'INTORG' if marked else 'INTEND'}'"
        if cost[column] or by_column[column] == by_column[column + 1]:
            yield f" {name} COST {cost[column]!r}"
        yield from (f" {name} r{rows[k]} {values[k]!r}" for k in range(by_column[column], by_column[column + 1]))
    if marked:
        yield " MEND 'MARKER' 'INTEND'"
    yield "RHS"
    if program.offset:
        yield f" RHS COST {-float(program.offset)!r}"
    for row, kind in enumerate(kinds):
        side = lower[row] if kind == "G" else upper[row]
        if kind != "N" and side:
            yield f" RHS r{row} {float(side)!r}"
    yield "RANGES"
    for row in np.flatnonzero((lower != upper) & np.isfinite(lower) & np.isfinite(upper)).tolist():
        yield f" RANGE r{row} {float(upper[row] - lower[row])!r}"
    yield "BOUNDS"
    for name, low, high in zip(names, program.lower.tolist(), program.upper.tolist(), strict=True):
        if low == high:
            yield f" FX BOUND {name} {low!r}"
            continue
        yield f" LO BOUND {name} {low!r}" if low > -INFINITY else f" MI BOUND {name}"
        yield f" UP BOUND {name} {high!r}" if high < INFINITY else f" PL BOUND {name}"
    yield "ENDATA"


def lp(program: Program, names: Sequence[str] | None = None, comments: Sequence[str] = ()) -> str:
    """CPLEX LP text; a row with two finite sides is two rows, r5 and r5_low, since not every reader takes one.

    Args:
        names: [columns] names without blanks; C0, C1, … where there are none.

    >>> from remat_solver.program import Builder, Term
    >>> builder = Builder()
    >>> x = builder.variables(2, cost=[1.0, 2.0])
    >>> builder.add_rows(1, [Term(0, x, 1.0)], lower=1.0)
    >>> print(lp(builder.program(), names=["x", "y"]), end="")
    Minimize
     COST: 1.0 x + 2.0 y
    Subject To
     r0: 1.0 x + 1.0 y >= 1.0
    Bounds
     0.0 <= x <= 1.0
     0.0 <= y <= 1.0
    General
     x y
    End
    """
    return "\n".join([*(f"\\ {line}" for line in comments), *_lp_lines(program, _named(program, names)), ""])


def _lp_lines(program: Program, names: Sequence[str]) -> Iterator[str]:
    yield "Minimize"
    priced = np.flatnonzero(program.cost).tolist()
    constant = [f"{'-' if program.offset < 0 else '+'} {abs(program.offset)!r}"] if program.offset else []
    yield from _sum("COST", [names[c] for c in priced], program.cost[priced].tolist(), " ".join(constant), names[:1])
    yield "Subject To"
    start, index, value = program.row_start.tolist(), program.row_index.tolist(), program.row_value.tolist()
    for row, (low, high) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
        inside = slice(start[row], start[row + 1])
        columns, values = [names[c] for c in index[inside]], value[inside]
        if low == high:
            yield from _sum(f"r{row}", columns, values, f"= {high!r}", names[:1])
            continue
        if high < INFINITY:
            yield from _sum(f"r{row}", columns, values, f"<= {high!r}", names[:1])
        if low > -INFINITY:
            yield from _sum(f"r{row}_low" if high < INFINITY else f"r{row}", columns, values, f">= {low!r}", names[:1])
    yield "Bounds"
    for name, low, high in zip(names, program.lower.tolist(), program.upper.tolist(), strict=True):
        if low == high:
            yield f" {name} = {low!r}"
        else:
            yield f" {_side(low)} <= {name} <= {_side(high)}"
    whole = [names[c] for c in np.flatnonzero(program.integer).tolist()]
    if whole:
        yield "General"
        yield from (" " + " ".join(whole[i : i + _PER_LINE]) for i in range(0, len(whole), _PER_LINE))
    yield "End"


def _sum(label: str, names: Sequence[str], values: Sequence[float], end: str, any_name: Sequence[str]) -> Iterator[str]:
    """A row or the objective, a few terms a line; one without terms has 0 times some column."""
    terms = [f"{'-' if v < 0 else '+'} {abs(v)!r} {n}" for n, v in zip(names, values, strict=True)]
    terms = terms or [f"+ 0 {any_name[0]}"]
    terms[0] = terms[0].removeprefix("+ ")
    lines = [" ".join(terms[i : i + _PER_LINE]) for i in range(0, len(terms), _PER_LINE)]
    lines[-1] += f" {end}" if end else ""
    yield f" {label}: {lines[0]}"
    yield from (f"  {line}" for line in lines[1:])


def _side(bound: float) -> str:
    return repr(bound) if abs(bound) < INFINITY else ("-inf" if bound < 0 else "+inf")


def _named(program: Program, names: Sequence[str] | None) -> Sequence[str]:
    return [f"C{column}" for column in range(program.columns)] if names is None else names


FORMATS: dict[str, Callable[..., str]] = {"mps": mps, "lp": lp}
"""How a program is written, by the name of the format."""
