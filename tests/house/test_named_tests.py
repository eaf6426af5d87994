"""The tests that the docs name are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_tests_that_a_page_names_are_there() -> None:
    named = {(path, name) for page in (ROOT / "docs").glob("*.md") for path, name in NAMED.findall(page.read_text())}
    assert len(named) > 20
    assert [f"{path}::{name}" for path, name in sorted(named) if f"def {name}(" not in (ROOT / path).read_text()] == []
