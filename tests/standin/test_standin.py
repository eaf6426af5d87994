"""The stand-in itself: its allocator, its streams, its generators, its two devices, and what it cannot miss."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from standin import device

pytestmark = pytest.mark.standin
MIB = 2**20


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB], MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([5 * MIB] * 4, 20 * MIB, 20 * MIB),
        ([5 * MIB] * 5, 25 * MIB, 40 * MIB),
        ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),  # more than 1 MiB is left, which is split off
        ([19 * MIB], 20 * MIB, 20 * MIB),  # 1 MiB is left, which is not split off
    ],
)
def test_sizes_and_segments_are_those_that_torch_documents(requests: list[int], allocated: int, reserved: int) -> None:
    before = device.figures(device.SPARE)
    blocks = [device.allocate(size) for size in requests]
    now = device.figures(device.SPARE)
    for block in blocks:
        assert block is not None
        device.release(block)
    assert now.requested - before.requested == sum(requests)
    assert now.reserved - before.reserved == reserved
    assert now.allocated - before.allocated == allocated
    device.empty_cache()
    assert device.figures(device.SPARE).reserved == before.reserved


def test_a_limit_is_met_after_the_cache_has_been_emptied() -> None:
    kept = device.allocate(12 * MIB)
    device.release(device.allocate(40 * MIB))
    with device.limited(60 * MIB, device.SPARE):
        second = device.allocate(44 * MIB)
        assert second is not None
        assert device.allocate(20 * MIB) is None
        device.release(second)
    device.release(kept)
    used = device.figures(1).reserved
    with device.limited(used + 20 * MIB, 1), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda:1")


def test_what_is_freed_is_overwritten() -> None:
    tensor = torch.ones(1000, device="cuda")
    held = torch.empty(0, device="cuda").set_(tensor.untyped_storage())
    address = held.data_ptr()
    del tensor, held
    again = torch.empty(1000, device="cuda")
    assert again.data_ptr() == address
    assert bool(again.isnan().all())


@pytest.mark.parametrize("lazy", [False, True])
def test_copies_on_side_streams_run_when_they_are_waited_for(lazy: bool) -> None:
    source, side = torch.arange(1000, device="cuda"), torch.cuda.Stream()
    host = torch.zeros(1000, dtype=torch.int64)
    with device.lazy_streams(lazy):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(source, non_blocking=True)
        assert bool(host.any()) is not lazy
        torch.cuda.current_stream().wait_stream(side)
        assert host[999] == 999


def test_memory_freed_under_a_copy_that_nobody_waited_for_spoils_it() -> None:
    source, side = torch.arange(1000, device="cuda"), torch.cuda.Stream()
    host = torch.zeros(1000, dtype=torch.int64)
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
    del source
    side.synchronize()
    assert host[999] != 999


def test_a_generator_is_replayed_by_its_state_and_each_device_has_its_own() -> None:
    torch.cuda.manual_seed_all(3)
    state, other = torch.cuda.get_rng_state(0), torch.cuda.get_rng_state(1)
    first = torch.rand(10, device="cuda")
    assert not torch.equal(torch.rand(10, device="cuda"), first)
    assert torch.equal(torch.cuda.get_rng_state(1), other)
    torch.cuda.set_rng_state(state, 0)
    assert torch.equal(torch.rand(10, device="cuda"), first)


def test_a_thread_starts_on_the_first_device_and_tensors_name_their_own() -> None:
    seen: list[int] = []
    before = device.figures(0).allocated
    with torch.cuda.device(1):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
        here = torch.ones(100, device="cuda")
    assert seen == [0]
    assert here.device == torch.device("cuda:1")
    assert (here + here).device == torch.device("cuda:1")
    assert device.figures(0).allocated == before


def test_it_is_built_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match="needs a C"):
        device.library(tmp_path)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(RuntimeError, match="failed"):
        device.library(tmp_path)
