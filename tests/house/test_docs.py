"""The documents hold: they build without a broken link, and their code runs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_parse(page: Path) -> None:
    """Every Python block is Python."""
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_json_blocks_parse(page: Path) -> None:
    """Every JSON block is JSON."""
    for block in blocks(page, "json"):
        json.loads(block)


def test_the_research_quick_start_runs() -> None:
    """The first block of the researcher's quick start proves an optimum and passes the judge."""
    code = blocks(ROOT / "docs" / "quickstart-research.md", "python")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("optimal"), done.stdout
    assert "Verdict" in done.stdout


def test_the_docs_build_without_a_broken_link(tmp_path: Path) -> None:
    """mkdocs in strict mode: a link to a page that is not there fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_method_is_documented() -> None:
    """The page of methods names each one that there is."""
    from remat_solver import METHODS

    page = (ROOT / "docs" / "methods.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in page] == []
