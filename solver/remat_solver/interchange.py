"""Programs and solutions as files: MPS and LP for any engine, and the solution files that engines return.

Numbers of a program read back exactly. Solution files are those of HiGHS, of CBC, of CPLEX, and those with a name and a
number on each line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat_ir import InvalidData

from .program import INFINITY, Floats, Program

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


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_XML = re.compile(r'<variable\b[^>]*?\bname="([^"]*)"[^>]*?\bvalue="([^"]*)"')
_CBC = re.compile(rf"^(?:\*\*)?\s*\d+\s+(\S+)\s+({_NUMBER})(?:\s|$)")
_PLAIN = re.compile(rf"^(\S+)\s+({_NUMBER})(?:\s+\(obj:.*\))?$")
_CBC_HEAD = re.compile(r"^(optimal|infeasible|integer infeasible|unbounded|stopped|status unknown)\b.*objective", re.I)
_ROW = re.compile(r"r\d+(?:_low)?")
_HEADS = ("objective", "solution", "model", "feasible", "optimal", "primal", "dual", "no")
_MOST_SHOWN = 60


class Solution(NamedTuple):
    """What a solution file says: the engine's own words on how it ended, and x by column."""

    said: str
    x: Floats


def read_solution(text: str, names: Sequence[str]) -> Solution:
    """Read a solution file; columns that it does not list are 0, as engines that leave zeros out mean it.

    Args:
        names: [columns] as the model file has them.

    Raises:
        InvalidData: no solution in it, a name that the model has not, a column twice, a line that is no value.

    >>> read_solution("Optimal - objective value 3\\n      0 y   1   2\\n", ["x", "y"]).x.tolist()
    [0.0, 1.0]
    """
    said, pairs = _pairs(text)
    column_of = {name: column for column, name in enumerate(names)}
    x = np.full(len(names), np.nan)
    for name, number in pairs:
        column = column_of.get(name)
        if column is None:
            if _ROW.fullmatch(name):  # CBC can list rows too
                continue
            raise InvalidData(
                f"the solution has a column {name[:_MOST_SHOWN]!r} that the model has not: is it of another graph, "
                "budget, method or option?"
            )
        if not np.isnan(x[column]):
            raise InvalidData(f"the solution has column {name[:_MOST_SHOWN]!r} twice")
        x[column] = number
    if len(names) and np.isnan(x).all():
        raise InvalidData(f"the file has no solution{': ' + said[:_MOST_SHOWN] if said else ''}")
    return Solution(said, np.nan_to_num(x, nan=0.0))


def solution_text(x: Floats) -> str:
    """Values of columns C0, C1, … in the form that CBC reads as a start."""
    lines = ["Stopped on time - objective value 0"]
    lines += [f"{column} C{column} {value!r} 0" for column, value in enumerate(x.tolist())]
    return "\n".join(lines) + "\n"


def _pairs(text: str) -> tuple[str, list[tuple[str, float]]]:
    lines = text.splitlines()
    if text.lstrip().startswith("<?xml"):
        return "", [(name, _number(value, name)) for name, value in _XML.findall(text)]
    if any(line.startswith("# Columns") for line in lines):
        return _highs(lines)
    head = lines[0].strip() if lines else ""
    if _CBC_HEAD.match(head):
        return head, [_matched(_CBC, i, line) for i, line in enumerate(lines) if i and line.strip()]
    return _plain(lines)


def _highs(lines: list[str]) -> tuple[str, list[tuple[str, float]]]:
    """The block of columns after "# Primal solution values"; "Model status" stands above its words."""
    said = next((lines[i + 1].strip() for i, line in enumerate(lines[:-1]) if line.strip() == "Model status"), "")
    at = next(i for i, line in enumerate(lines) if line.startswith("# Columns"))
    count = lines[at].split()[-1]
    if not count.isdigit() or len(lines) < at + 1 + int(count):
        raise InvalidData(f"line {at + 1} of the solution announces more columns than the file has: it is cut off")
    return said, [_matched(_PLAIN, i, lines[i]) for i in range(at + 1, at + 1 + int(count))]


def _plain(lines: list[str]) -> tuple[str, list[tuple[str, float]]]:
    """A name and a number on each line (Gurobi, SCIP), comments and a heading or two aside."""
    said = ""
    pairs: list[tuple[str, float]] = []
    for i, line in enumerate(lines):
        if not (bare := line.strip()) or bare.startswith("#"):
            continue
        if not pairs and bare.lower().startswith(_HEADS):
            said = said or bare
            continue
        pairs.append(_matched(_PLAIN, i, bare))
    return said, pairs


def _matched(form: re.Pattern[str], i: int, line: str) -> tuple[str, float]:
    found = form.match(line.strip())
    if found is None:
        raise InvalidData(f"line {i + 1} of the solution is no column and its value: {line.strip()[:_MOST_SHOWN]!r}")
    return found.group(1), _number(found.group(2), found.group(1))


def _number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise InvalidData(f"the solution's value of {name[:_MOST_SHOWN]!r} is no finite number: {text[:20]!r}")
    return number
