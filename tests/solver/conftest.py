"""What tests of programs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remat_solver.backends.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One that serves the many small programs of a module, since starting one takes longer than they do."""
    with Engine("highs") as held:
        yield held
