"""The tests that the docs name are there, and each row of what differs on CUDA names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_tests_that_a_page_names_are_there() -> None:
    named = {(path, name) for page in (ROOT / "docs").glob("*.md") for path, name in NAMED.findall(page.read_text())}
    assert len(named) > 20
    assert [f"{path}::{name}" for path, name in sorted(named) if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_what_differs_on_cuda_is_shown_by_tests() -> None:
    table = (ROOT / "docs/device.md").read_text().split("## What differs on CUDA")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 21
    assert [row for row in rows if not NAMED.search(row)] == []
