"""The page on the papers: what shows a row exists, its numbers are those of the files, and so is its verdict."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from benchmarks.figures.claims import CLAIMS, SOURCE, Claim, Sense, page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
FOLDER = ROOT / "benchmarks" / "results" / "figures"
LINES = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| ---")]
ROWS = [line for line in LINES if line.count("|") - line.count("\\|") == 6 and not line.startswith("| what |")]


def cells(row: str) -> list[str]:
    """What stands in a row: what, paper, here, verdict, shown by."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def number(cell: str) -> float:
    """The number that a cell begins with."""
    found = re.match(r"[\d.]*\d", cell)
    assert found is not None, cell
    return float(found[0])


def broken(named: str) -> str | None:
    """What is wrong with a command or a test, or None."""
    if found := re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", named):
        path, name = ROOT / found[1], found[2]
        if not path.exists():
            return f"no file {found[1]}"
        tree = ast.parse(path.read_text())
        return None if name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} else f"no test {name}"
    if found := re.fullmatch(r"`python -m ([\w.]+)(?: (\w+))?`(?:, `([\w./-]+)`)?", named):
        if found[3] is not None and not (ROOT / found[3]).exists():
            return f"no file {found[3]}"
        if importlib.util.find_spec(found[1]) is None:
            return f"no module {found[1]}"
        if found[2] is None:
            return None
        from benchmarks.figures.measure import MEASURES

        known = MEASURES if found[1] == "benchmarks.figures" else {}
        return None if found[2] in known else f"{found[1]} has no {found[2]}"
    return "neither a test nor a command"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_what_shows_a_row_exists(row: str) -> None:
    *_, verdict, named = cells(row)
    assert broken(named) is None
    assert verdict in ("equal", "near", "better", "not")


def test_every_paper_has_its_rows() -> None:
    assert len(ROWS) > 100
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert sections == ["Corrections to the papers", "Checkmate", "Rotor", "Join networks", "POFO"]


def judged(paper: float, ours: float, sense: str) -> str:
    """The verdict on two numbers, by the sentences at the head of the page."""
    if sense == "at most":
        return "equal" if ours <= paper else "not"
    if 0.995 <= ours / paper <= 1.005:
        return "equal"
    if (sense, ours > paper) in (("more", True), ("less", False)):
        return "better"
    return "near" if 0.9 <= ours / paper <= 1.1 else "not"


def test_numbers_and_verdicts_are_those_of_the_files() -> None:
    """Each row with a file: the paper's number is read from the page, ours from the file, and both are judged again."""
    found = {cells(row)[0]: row for row in ROWS}
    claims = [claim for makers in CLAIMS.values() for make in makers for claim in make(FOLDER)]
    assert len(claims) > 40
    for claim in claims:
        _, paper, ours, verdict, _ = cells(found[claim.what])
        assert float(claim.show.format(claim.ours)) == number(ours), claim.what
        assert ("*" in ours) == bool(claim.mark), claim.what
        # near a threshold the number that is shown, rounded, may lie on its other side
        assert verdict in {judged(number(paper), value, claim.sense) for value in (claim.ours, number(ours))}, (
            claim.what
        )


def test_the_committed_page_is_that_of_the_files() -> None:
    assert PAGE.read_text() == page(SOURCE.read_text(), FOLDER)


@pytest.mark.parametrize(
    ("ours", "sense", "verdict"),
    [
        (1.003, "more", "equal"),
        (1.2, "more", "better"),
        (0.95, "more", "near"),
        (0.8, "more", "not"),
        (0.8, "less", "better"),
        (1.2, "less", "not"),
        (1.2, "same", "not"),
        (0.8, "at most", "equal"),
        (1.01, "at most", "not"),
    ],
)
def test_a_number_that_changes_changes_its_verdict(ours: float, sense: Sense, verdict: str) -> None:
    assert Claim("what", 1.0, ours, sense, "{:.2f}", "shown").verdict == verdict


@pytest.mark.parametrize(
    "named",
    [
        "`tests/solver/test_join.py::test_nothing`",
        "`tests/nowhere.py::test_toy`",
        "`python -m benchmarks.nothing`",
        "`python -m benchmarks.figures nothing`",
        "`python -m benchmarks.figures times`, `benchmarks/results/figures/nothing.csv`",
        "a promise",
    ],
)
def test_a_planted_name_is_found(named: str) -> None:
    assert broken(named) is not None
