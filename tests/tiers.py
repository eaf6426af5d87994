"""Which cases of a test `make test` runs, and which wait for `make test-thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(quick: int, cases: Iterable[Any], every_change: int | None = None) -> list[Any]:
    """The cases of a parametrized test: all but the first few are thorough ones. A tuple has several values.

    After `every_change` of them they are slow ones, which run nightly.
    """
    found: list[Any] = []
    for at, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        mark = pytest.mark.thorough if every_change is None or at < every_change else pytest.mark.slow
        found.append(case if at < quick else pytest.param(*values, marks=mark))
    return found
