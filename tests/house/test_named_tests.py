"""The tests that the docs name are there, and each row of what differs on CUDA names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    for path, name in NAMED.findall(page.read_text()):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


def test_what_differs_on_cuda_is_shown_by_tests() -> None:
    table = (ROOT / "docs/device.md").read_text().split("## What differs on CUDA")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 21
    assert [row for row in rows if not NAMED.search(row)] == []
