"""These tests run in processes with the stand-in only, by `make test-standin`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from standin import device

if not device.loaded():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Each test begins with nothing under way and an empty cache, and leaves both devices as they were."""
    yield
    import gc

    import torch

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
