"""What tests of programs and of contradictions share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat_solver.backends.engine import Engine
from remat_solver.contradiction import LOG


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One that serves the many small programs of a module, since starting one takes longer than they do."""
    with Engine("highs") as held:
        yield held


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is logged about contradictions, in a test that makes some."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(LOG, "handlers", [handler])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return lines
