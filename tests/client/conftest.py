"""The client's tests neither read nor leave anything in the caller's own cache, and ask no service of the caller's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from remat.planning.profiles import DiskProfiles
from remat.profiling import timing


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def own_surroundings(own_cache: Path) -> Iterator[None]:
    """Until the module's end: the tests of the service that follow in the same process have settings of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("REMAT_")]:
            patch.delenv(name)
        patch.setenv("REMAT_CACHE_DIR", str(own_cache))
        # what plans are worth is none of these tests' business: one sample of each kernel is enough
        patch.setattr(timing, "ROUNDS", 1)
        patch.setattr(timing, "SAMPLES", 1)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """With several, eager PyTorch differs from itself: threads add to the same numbers in any order."""
    torch.set_num_threads(1)


@pytest.fixture
def anew() -> None:
    """No compilation of another test is known, and the numbers that are drawn are the same in every order of tests."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan and no profile of another test is known."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> DiskProfiles:
    """What the kernels of one module's tests cost, measured once."""
    return DiskProfiles(tmp_path_factory.mktemp("profiles"))


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compilation of another test is seen, and only one compiler runs at once."""
    import torch._inductor.config as config

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What the capture says of blocks that repeat."""
    caplog.set_level(logging.INFO, "remat")
    return lambda: " ".join(record.getMessage() for record in caplog.records if "block" in record.getMessage())


@pytest.fixture
def no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where only the thin client is installed: the fallback is the greedy plan."""
    monkeypatch.setattr("remat.planning.sources.entry_points", lambda **_: [])
