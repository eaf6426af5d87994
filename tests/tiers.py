"""Which cases of a test `make test` runs, and which wait for `make test-thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(quick: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrized test: all but the first few are thorough ones. A tuple has several values."""
    return [
        case
        if at < quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
        for at, case in enumerate(cases)
    ]
