"""The lane leaves nothing in the caller's own cache, and knows the backend by its name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from client.conftest import own_cache, own_surroundings
from client.named_backend import installed

__all__ = ["own_cache", "own_surroundings"]


@pytest.fixture(scope="session", autouse=True)
def known_by_name(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        installed(tmp_path_factory.mktemp("site"), patch)
        yield


@pytest.fixture(autouse=True)
def alone() -> None:
    """One thread sums in one order, and no graph of another test is found again."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
