"""How long one kernel takes within a step: caches half full of other things, rounds apart from one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..device import Accelerator, Device

VERSION = 2
"""Costs measured another way are not mixed with these."""

ROUNDS = 3
SAMPLES = 3
"""In each round, after one call that is not counted."""

LONGEST_NS = 60_000_000
"""Of one kernel in one round; a longer one is sampled less often."""

USUAL_CACHE_BYTES = 32 * 2**20
LARGEST_CACHE_BYTES = 64 * 2**20
"""Of larger ones, which many cores share, one step has no more."""


def times(calls: Mapping[str, Callable[[], Callable[[], Any]]], devices: Mapping[str, Device]) -> dict[str, int]:
    """The time of each kernel in ns, rounded.

    Within a step a kernel finds part of what it reads in the caches, and of what it writes nothing: between two calls
    half of the last cache is filled with something else. Kernels take turns, so that whatever else the machine does
    spoils few samples of each rather than all of one, and the median is taken. With one thread the thread's own
    clock is read, to which other work on the machine adds nothing.

    Args:
        calls: makes the kernel's inputs, and returns what runs it on them.
        devices: where each runs; its time is measured there.
    """
    samples: dict[str, list[float]] = {name: [] for name in sorted(calls)}
    crowd = torch.zeros(_cache_bytes() // 2 // 4)
    for _ in range(ROUNDS):
        for name, found in samples.items():
            with devices[name].guard():
                call = calls[name]()
                found.extend(_samples(call, devices[name], crowd))
    return {name: rounded(sorted(found)[len(found) // 2]) for name, found in samples.items()}


def rounded(nanoseconds: float) -> int:
    """Two significant digits: what is measured twice should mostly come out the same."""
    value = max(1, round(nanoseconds))
    unit = 10 ** max(0, len(str(value)) - 2)
    return int(round(value / unit) * unit)


def _samples(call: Callable[[], Any], device: Device, crowd: torch.Tensor) -> list[float]:
    if isinstance(device, Accelerator):  # short kernels vary more there, and its caches are not filled in between
        for _ in range(3):
            call()
        return [statistics.median_high(device.elapsed_ns(call) for _ in range(10))]
    call()
    found: list[float] = []
    begin = time.perf_counter_ns()
    while len(found) < SAMPLES and (not found or time.perf_counter_ns() - begin < LONGEST_NS):
        crowd.add_(1.0)
        found.append(device.elapsed_ns(call))  # what it makes is freed within the time, as it is in a step
    return found


def _cache_bytes() -> int:
    """The size of the last cache level that a core has."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        units = {"K": 2**10, "M": 2**20}
        size = max(int(text[:-1]) * units[text[-1]] for text in (path.read_text().strip() for path in sizes))
        return min(size, LARGEST_CACHE_BYTES)
    except (OSError, ValueError, KeyError, IndexError):
        return USUAL_CACHE_BYTES
