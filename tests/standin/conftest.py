"""These tests run in processes with the stand-in only, by `make test-standin`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client.conftest import profiles
from standin import device

__all__ = ["profiles"]

if not device.loaded():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Each test has one thread, begins with an empty cache and nothing under way, and leaves both devices so."""
    import gc

    import torch

    torch.set_num_threads(1)
    device.empty_cache()
    yield
    gc.collect()
    torch.cuda.synchronize()
    device.empty_cache()
    assert torch.cuda.current_device() == 0, "a test has left another device current"


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the caller's cache is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
