"""How long one kernel takes within a step: caches half full of other things, rounds apart from one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..device import Accelerator, Device

VERSION = 3
"""Costs measured another way are not mixed with these."""

ROUNDS = 3
SAMPLES = 3
"""In each round, after one call that is not counted."""

LONGEST_NS = 60_000_000
"""Of one kernel in one round; a longer one is sampled less often."""

LARGEST_CACHE_BYTES = 64 * 2**20
"""Of larger ones, which many cores share, one step has no more."""

FILLS = 8
"""So often an accelerator fills its cache before a sample, which takes longer than the host needs for a launch."""


def times(calls: Mapping[str, Callable[[], Callable[[], Any]]], devices: Mapping[str, Device]) -> dict[str, int]:
    """The time of each kernel in ns, rounded.

    Within a step a kernel finds part of what it reads in the caches, and of what it writes nothing: between two calls
    half of the device's last cache is filled with something else. Kernels take turns, so that whatever else the machine
    does spoils few samples of each rather than all of one, and the median is taken. On the CPU with one thread the
    thread's own clock is read, to which other work on the machine adds nothing.

    Args:
        calls: makes the kernel's inputs, and returns what runs it on them.
        devices: where each runs; its time is measured there.
    """
    samples: dict[str, list[float]] = {name: [] for name in sorted(calls)}
    crowds: dict[torch.device, torch.Tensor] = {}
    for _ in range(ROUNDS):
        for name, found in samples.items():
            device = devices[name]
            if device.device not in crowds:
                size = min(device.cache_bytes, LARGEST_CACHE_BYTES)
                crowds[device.device] = torch.zeros(size // 2 // 4, device=device.device)
            with device.guard():
                found.extend(_samples(calls[name](), device, crowds[device.device]))
    return {name: rounded(sorted(found)[len(found) // 2]) for name, found in samples.items()}


def rounded(nanoseconds: float) -> int:
    """Two significant digits: what is measured twice should mostly come out the same."""
    value = max(1, round(nanoseconds))
    unit = 10 ** max(0, len(str(value)) - 2)
    return int(round(value / unit) * unit)


def _samples(call: Callable[[], Any], device: Device, crowd: torch.Tensor) -> list[float]:
    if isinstance(device, Accelerator):  # short kernels vary more there

        def fill() -> None:
            for _ in range(FILLS):
                crowd.add_(1.0)

        for _ in range(3):
            call()
        return [statistics.median_high(device.elapsed_ns(call, fill) for _ in range(10))]
    call()
    found: list[float] = []
    begin = time.perf_counter_ns()
    while len(found) < SAMPLES and (not found or time.perf_counter_ns() - begin < LONGEST_NS):
        found.append(
            device.elapsed_ns(call, lambda: crowd.add_(1.0))
        )  # what it makes is freed within the time, as it is in a step
    return found
