"""The tests and the measuring commands that the docs name are there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
COMMAND = re.compile(r"python -m (benchmarks[\w.]*)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_tests_that_a_page_names_are_there() -> None:
    named = {(path, name) for page in PAGES for path, name in TEST.findall(page.read_text())}
    assert named
    assert [f"{path}::{name}" for path, name in sorted(named) if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_commands_that_a_page_names_are_there() -> None:
    named = {module for page in PAGES for module in COMMAND.findall(page.read_text())}
    assert named
    assert [module for module in sorted(named) if importlib.util.find_spec(module.rstrip(".")) is None] == []
