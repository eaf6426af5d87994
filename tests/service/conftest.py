"""One service shared by the tests that leave it as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from service.serving import Service, serving

os.environ.setdefault("REMAT_SEAL_KEY", "the key of all services that these tests start")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A running service with two solvers and a SQLite file of its own."""
    with serving(tmp_path_factory.mktemp("service"), workers=2) as running:
        yield running
