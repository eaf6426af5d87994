"""The adapter to devices on the CPU: what is watched, generators, recognised errors, and transfers nobody waits for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from remat import generators
from remat.chains.transfer import UnderWay, bandwidth
from remat.device import Host, device_failed, of, of_messages, out_of_memory, storage_bytes
from remat.profiling.measure import Outcome, differences


def test_a_watch_tells_peak_and_rest_of_each_interval() -> None:
    watch = of("cpu").watch()
    watch.start()
    first = torch.empty(1000, dtype=torch.uint8)
    second = torch.empty(500, dtype=torch.uint8)
    del second
    watch.cut("one")
    third = torch.empty(4000, dtype=torch.uint8)
    del third, first
    found = watch.stop("two")
    assert found == [("one", 1500, 1000), ("two", 5000, 0)]


def test_generators_are_kept_where_an_error_comes_out() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), generators.kept():
        torch.rand(5).view(7)
    assert torch.equal(before, torch.get_rng_state())
    states = generators.noted(torch.device("cpu"))
    drawn = torch.rand(4)
    states.restore()
    assert torch.equal(drawn, torch.rand(4))


def test_outcomes_differ_by_the_generator_of_their_device() -> None:
    def outcome() -> Outcome:
        return Outcome(torch.zeros(()), {}, {}, generators.noted(torch.device("cpu")))

    one, same = outcome(), outcome()
    torch.rand(1)
    assert differences(one, same) == []
    assert differences(one, outcome()) == ["generator cpu"]


def test_the_host_rounds_nothing_and_is_described() -> None:
    assert storage_bytes(torch.empty(3, dtype=torch.uint8)) == 3
    assert storage_bytes(torch.empty(3, dtype=torch.uint8), at_least=7) == 7
    assert isinstance(of("cpu"), Host)
    assert isinstance(of("meta"), Host)
    assert of("cpu").describe().endswith(f"threads {torch.get_num_threads()}")
    assert of("cpu").elapsed_ns(lambda: torch.rand(10_000)) > 0
    assert bandwidth(torch.device("cpu"), sizes=(2**16,)) > 0


def test_out_of_memory_is_told_from_a_kernel_that_refuses() -> None:
    with pytest.raises(RuntimeError) as huge:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(huge.value)
    assert device_failed(huge.value)
    with pytest.raises(RuntimeError) as wrong:
        torch.ones(2).view(3)
    assert not device_failed(wrong.value)
    assert device_failed(torch.OutOfMemoryError("none left"))
    assert device_failed(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))


class Stream:
    """A stream that only notes whom it has waited for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited.append(stream)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@pytest.mark.parametrize("issued", [False, True])
def test_a_transfer_that_nobody_waits_for_is_waited_for_before_its_memory_is_freed(issued: bool) -> None:
    computing, side, event = Stream(), Stream(), object()
    token = UnderWay(computing, side, [torch.empty(8).untyped_storage()])
    token.event = event if issued else None
    del token
    assert computing.waited == [event if issued else side]
    token = UnderWay(computing, side, [torch.empty(8).untyped_storage()])
    token.end(other := Stream())
    del token
    assert len(other.waited) == len(computing.waited) == 1


def test_messages_of_gloo_lie_on_the_host(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert of_messages(None) == torch.device("cpu")
    finally:
        dist.destroy_process_group()
