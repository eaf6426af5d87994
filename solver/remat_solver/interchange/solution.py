"""Solution files: those of HiGHS, of CBC, of CPLEX, and those with a name and a number on each line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remat_ir import InvalidData

from ..program import Floats

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
