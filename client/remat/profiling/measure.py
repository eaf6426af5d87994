"""What a step really costs: peak memory by events of the allocator or by lifetimes of storages, and time."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _compat
from ..capture.dataflow import tensors
from ..device import Interval, of, storage_bytes
from ..generators import Generators, noted


class Outcome(NamedTuple):
    """What a training step leaves behind: the loss, gradients and buffers by name, the generators' states."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    generators: Generators


class Window:
    """A stretch of time in which a device's allocator is watched, in this thread.

    One window at a time is open in a thread, and none next to a profiler (`_compat.recording`).
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._watch = of(device).watch()

    def open(self) -> None:
        """From now on."""
        self._watch.start()

    def close(self) -> Interval:
        """Until now: the peak and what is left, in bytes above the beginning."""
        found = self._watch.stop()
        most = max(part.allocated_bytes for part in found)
        return Interval("", max(part.peak_bytes for part in found), found[-1].left_bytes, most)


def peak_memory(run: Callable[[], object], device: str | torch.device = "cpu") -> Interval:
    """Run once and measure its peak on a device, in bytes above what was allocated before."""
    gc.collect()
    window = Window(device)
    window.open()
    try:
        result = run()
    finally:
        found = window.close()
    del result
    return found


def forward_backward(
    module: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Callable[[], torch.Tensor]:
    """One forward and one backward pass as a function of nothing; `loss` picks or makes the scalar from the output."""
    pick = loss or loss_of

    def step() -> torch.Tensor:
        output = module(*args, **(kwargs or {}))
        value = pick(output)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    return step


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: the output itself, its `loss`, or its first entry."""
    loss: torch.Tensor
    if isinstance(output, torch.Tensor):
        loss = output
    elif getattr(output, "loss", None) is not None:
        loss = output.loss
    else:
        loss = output["loss"] if isinstance(output, Mapping) else output[0]
    return loss


def outcome(module: nn.Module, step: Callable[[], torch.Tensor], seed: int = 0) -> Outcome:
    """Run a step of a module from a seed and from no gradients, and copy what it leaves behind."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = step()
    return Outcome(
        loss.clone(),
        {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        {name: b.clone() for name, b in module.named_buffers()},
        noted(loss.device),
    )


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What is not bitwise equal in two outcomes, by name; empty when they are the same."""
    found = [] if torch.equal(one.loss, other.loss) else ["loss"]
    for what, mine, theirs in (
        ("gradient", one.gradients, other.gradients),
        ("buffer", one.buffers, other.buffers),
    ):
        for name in sorted(set(mine) | set(theirs)):
            a, b = mine.get(name), theirs.get(name)
            if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b)):
                found.append(f"{what} {name}")
    for (device, first), (_, second) in zip(one.generators.states, other.generators.states, strict=True):
        if not torch.equal(first, second):
            found.append(f"generator {device.device}")
    return found


def seconds(
    run: Callable[[], object], device: str | torch.device = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """How long one run takes, by a clock of seconds or of another unit."""
    there = of(device)
    there.synchronize()
    start = clock()
    run()
    there.synchronize()
    return clock() - start


class Lifetimes(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A window as `Window`, in which storages are counted until they are gone, and not what an allocator tells.

    A CPU's allocator tells a thread of what that thread frees alone, and a backend's threads free what collectives have
    used. What a kernel allocates for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._start = self._peak = 0

    def open(self) -> None:
        """From now on."""
        self._start = self._peak = self._bytes()
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> Interval:
        """Until now: the peak and what is left, in bytes above the beginning."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        most = self._peak - self._start
        return Interval("", most, self._bytes() - self._start, most)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {_compat.storage_key(t) for t in tensors((args, kwargs))}
        for tensor in tensors(results):
            key = _compat.storage_key(tensor)
            if key not in given:
                storage = tensor.untyped_storage()
                self._live[key] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._peak = max(self._peak, self._bytes())
        return results

    def _bytes(self) -> int:
        gone = [key for key, (storage, _) in self._live.items() if storage.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._live[key]
        return sum(size for _, size in self._live.values())


class NeedsNumbers(Exception):
    """Something that runs on fake tensors asks which way to go."""


class Allocations(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages from their making to their end, while it is entered.

    Args:
        device: the kind of device that counts, such as "cuda".
        read_as: what a number that is read from a tensor is taken for, where that has none; a bool cannot be.

    Attributes:
        now: bytes that are there of what has been made so far.
    """

    def __init__(self, device: str, read_as: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._device, self._read_as = device, read_as
        self._peak = 0
        self._held: dict[int, int] = {}

    def most(self, run: Callable[[], object]) -> int:
        """The most bytes of what has been made so far, while something runs."""
        self._peak = self.now
        run()
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._read_as is not None and func is _compat.READ_NUMBER:
            if args[0].dtype is torch.bool:
                raise NeedsNumbers
            return self._read_as if args[0].dtype.is_floating_point else int(self._read_as)
        made = func(*args, **(kwargs or {}))
        for tensor in tensors(made):
            self._see(tensor)
        return made

    def _see(self, tensor: torch.Tensor) -> None:
        key = _compat.storage_key(tensor)
        if tensor.device.type == self._device and key not in self._held:
            size = storage_bytes(tensor)
            self._held[key] = size
            self.now += size
            self._peak = max(self._peak, self.now)
            weakref.finalize(tensor.untyped_storage(), self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._held.pop(key)
