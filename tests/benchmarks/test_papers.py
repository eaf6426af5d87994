"""The page on the papers names commands and tests that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
LINES = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| ---")]
ROWS = [line for line in LINES if line.count("|") - line.count("\\|") == 5 and not line.startswith("| what |")]


def shown_by(row: str) -> str:
    """The last cell of a row."""
    return re.split(r"(?<!\\\\)\|", row)[-2].strip()


def broken(named: str) -> str | None:
    """What is wrong with a command or a test, or None."""
    if found := re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", named):
        path, name = ROOT / found[1], found[2]
        if not path.exists():
            return f"no file {found[1]}"
        tree = ast.parse(path.read_text())
        return None if name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} else f"no test {name}"
    if found := re.fullmatch(r"`python -m ([\w.]+)(?: (\w+))?`", named):
        if importlib.util.find_spec(found[1]) is None:
            return f"no module {found[1]}"
        if found[2] is None:
            return None
        from benchmarks.figures.measure import MEASURES

        known = MEASURES if found[1] == "benchmarks.figures" else {}
        return None if found[2] in known else f"{found[1]} has no {found[2]}"
    return "neither a test nor a command"


def test_what_shows_a_row_exists() -> None:
    assert {row: why for row in ROWS if (why := broken(shown_by(row)))} == {}


@pytest.mark.parametrize(
    "named",
    [
        "`tests/solver/test_join.py::test_nothing`",
        "`tests/nowhere.py::test_toy`",
        "`python -m benchmarks.nothing`",
        "`python -m benchmarks.figures nothing`",
        "a promise",
    ],
)
def test_a_planted_name_is_found(named: str) -> None:
    assert broken(named) is not None
