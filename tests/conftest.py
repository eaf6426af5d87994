"""What holds for every test: a bound above the cost of a verified plan of its space is an error."""

from __future__ import annotations

import gc
import logging.handlers
import os
from collections.abc import Iterator

import pytest

# Torch's threads wait asleep: two processes of tests have twice as many as there are cores, and those that spin at the
# end of each small kernel take the time of those that compute. OpenMP reads it once, while torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from remat_solver.contradiction import LOG


def pytest_collection_finish() -> None:
    """Leave what was imported so far, millions of objects, out of every later collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_contradiction() -> Iterator[None]:
    """Fail a test in which a proof and a verified plan disagree, in whichever thread it was."""
    collect = logging.handlers.BufferingHandler(2**30)
    LOG.addHandler(collect)
    yield
    LOG.removeHandler(collect)
    assert not [record.getMessage() for record in collect.buffer]
