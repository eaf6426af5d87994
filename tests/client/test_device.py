"""The adapter to devices on the CPU: what is watched, generators, recognised errors, and transfers nobody waits for."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from remat import generators
from remat.device import Device, of, storage_bytes
from remat.device_flags import (
    ATOMICS,
    BENCHMARK,
    device_failed,
    driver_says,
    flags,
    out_of_memory,
    power_limit,
    risks,
)
from remat.lowering.link import UnderWay, measured_link
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
    assert found == [("one", 1500, 1000, 1500), ("two", 5000, 0, 5000)]


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


def in_full() -> tuple[object, ...]:
    kind, words, *rest = np.random.get_state()
    return random.getstate(), kind, words.tobytes(), *rest


def unlike(bits: Any) -> None:
    """Another bit generator of numpy's, and back: its state is nowhere that is looked at."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(bits)
    with generators.kept(torch.device("cpu")):
        now = np.random.get_state(legacy=False)["state"]
        np.random.rand()
    assert np.random.get_state(legacy=False)["state"] == now
    np.random.set_bit_generator(before)


DRAWS: tuple[Callable[[], object], ...] = (
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.seed(4),
    lambda: random.shuffle([1, 2, 3]),
    np.random.rand,
    np.random.randn,
    lambda: np.random.seed(5),
    lambda: np.random.binomial(10, 0.3),
    lambda: unlike(np.random.PCG64(3)),
    lambda: np.random.set_bit_generator(np.random.MT19937(np.random.randint(9))),
)


def test_states_are_those_that_are_read_in_full_whatever_was_drawn_or_put_back() -> None:
    choice = random.Random(1)
    seen: list[tuple[generators.Generators, tuple[object, ...]]] = []
    with generators.kept():
        for _ in range(1000):
            if seen and choice.random() < 0.3:
                states, full = choice.choice(seen)
                states.restore()
                assert in_full() == full
            choice.choice(DRAWS)()
            states, full = generators.noted(torch.device("cpu")), in_full()
            noted = states.numpy
            words = (noted["state"]["key"].tobytes(), noted["state"]["pos"], noted["has_gauss"], noted["gauss"])
            assert (states.python, noted["bit_generator"], *words) == full
            again = states.drawn_from()
            assert (again.python, again.numpy) == (None, None), "nothing has been drawn since"
            random.random()
            again = states.drawn_from()
            assert (again.python, again.numpy) == (states.python, None)
            states.restore()
            seen = [*seen[-9:], (states, full)]


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
    assert type(of("cpu")) is Device
    assert type(of("meta")) is Device
    assert of("cpu").describe().endswith(f"threads {torch.get_num_threads()}")
    assert of("cpu").elapsed_ns(lambda: torch.rand(10_000), lambda: None) > 0
    assert min(measured_link(torch.device("cpu"), sizes=(2**16,))) > 0


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


def test_a_driver_tells_the_power_that_a_device_may_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$*" in\n*power.limit*GPU-one) echo "700.00 W" ;;\n*) exit 6 ;;\nesac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    driver_says.cache_clear()
    assert power_limit(SimpleNamespace(uuid="one")) == "700.00 W"
    assert power_limit(SimpleNamespace(uuid="other")) == power_limit(SimpleNamespace()) == "unknown"


def test_settings_that_choose_kernels_are_in_the_shared_key_and_risky_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = flags()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert "benchmark True" in flags() != before
    assert "cublas :4096:8" in flags()
    assert risks() == [BENCHMARK, ATOMICS]
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic True" in flags()
        assert risks() == [BENCHMARK]
    finally:
        torch.use_deterministic_algorithms(False)
