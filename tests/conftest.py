"""What holds for every test: a bound above the cost of a verified plan of its space is an error."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from remat_solver.contradiction import LOG


def pytest_collection_finish() -> None:
    """Leave what was imported so far, millions of objects, out of every later collection."""
    gc.collect()
    gc.freeze()


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture(autouse=True)
def no_contradiction() -> Iterator[None]:
    """Fail a test in which a proof and a verified plan disagree, in whichever thread it was."""
    collect = _Collect()
    LOG.addHandler(collect)
    yield
    LOG.removeHandler(collect)
    assert not collect.said
