"""All that depends on the kind of device, behind one small interface: the host with its CPU, or an accelerator.

A device is the one that tensors name, never the current one of a thread. `torch.cuda`, which is ROCm's too, and
`torch.xpu` offer the same functions (`torch.get_device_module`), so that one class serves all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from . import _compat
from .device_flags import USUAL_CACHE_BYTES, cpu_cache_bytes, cpu_name, flags, power_limit


class Interval(NamedTuple):
    """A part of what was watched: its highest and its last count of bytes, above the count when watching began.

    On an accelerator the two count what was asked for; `allocated_bytes`, the highest, counts whole blocks, whose size
    is rounded and whose rest of up to 1 MiB is not always split off. On the CPU a block is as large as what was asked
    for.
    """

    label: str
    peak_bytes: int
    left_bytes: int
    allocated_bytes: int


class Watch:
    """The allocator of a device, watched while this thread works; one at a time is open in a thread.

    That of the host: one recording with marks in it, since autograd gives each node of a backward pass the profiler of
    when it began.
    """

    def start(self, gives_way: Callable[[], None] | None = None) -> None:
        """From now on.

        Args:
            gives_way: called if another watch begins in this thread, which ends this one; None: none may.
        """
        _compat.start_recording(gives_way)

    def cut(self, label: str) -> None:
        """An interval ends here, and the next one begins."""
        _compat.mark(label)

    def stop(self, label: str = "") -> list[Interval]:
        """Until now: all intervals, in order."""
        found: list[Interval] = []
        now = worst = 0
        for event in (*_compat.stop_marked_recording(), label):
            if isinstance(event, int):
                now += event
                worst = max(worst, now)
            else:
                found.append(Interval(event, worst, now, worst))
                worst = now
        return found


class _AcceleratorWatch(Watch):
    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._before = device.memory()
        self._found: list[Interval] = []

    def start(self, gives_way: Callable[[], None] | None = None) -> None:
        self._device.synchronize()
        self._before, self._found = self._device.memory(), []
        self._device.reset_peaks()

    def cut(self, label: str) -> None:
        self._device.synchronize()
        now, before = self._device.memory(), self._before
        peak, left = now.peak_requested - before.requested, now.requested - before.requested
        self._found.append(Interval(label, peak, left, now.peak_allocated - before.allocated))
        self._device.reset_peaks()

    def stop(self, label: str = "") -> list[Interval]:
        self.cut(label)
        return self._found


def clock_ns() -> int:
    """Processor time where torch uses one thread, to which other work on the machine adds nothing; else wall time."""
    return time.thread_time_ns() if torch.get_num_threads() == 1 else time.perf_counter_ns()


class Device:
    """A device, as the tensors on it name it: the CPU, or any of a kind whose memory torch does not report.

    An `Accelerator` has its own of everything here.
    """

    GRANULE = 1
    """The allocator rounds each request up to a multiple of so many bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def describe(self) -> str:
        """The kind of device and what else decides how long a kernel takes there, in words.

        That is the CPU's model and how many threads torch uses.
        """
        name = cpu_name() if self.device.type == "cpu" else self.device.type
        return f"{self.device.type} {name} torch {torch.__version__} threads {torch.get_num_threads()}"

    def synchronize(self) -> None:
        """Wait until all that was issued to it has ended: of the host nothing is under way."""

    def guard(self) -> AbstractContextManager[Any]:
        """Makes it the current device of this thread, for code that names no device; the host is no such."""
        return nullcontext()

    def elapsed_ns(self, run: Callable[[], Any], before: Callable[[], Any]) -> float:
        """How long the device is busy with what a function issues, when it has ended what `before` issues."""
        before()
        start = clock_ns()
        run()
        return clock_ns() - start

    @property
    def cache_bytes(self) -> int:
        """The size of its last cache: of the last level that a core has, as Linux tells."""
        return cpu_cache_bytes()

    def capturing(self) -> bool:
        """Whether what this thread issues is recorded as a graph of kernels and not run."""
        return False

    def watch(self) -> Watch:
        """A new watch on its allocator, by that one's events: none of them while a profiler is at work."""
        return Watch()

    def requested_bytes(self) -> int:
        """Bytes that are allocated now, where the allocator counts them; else 0."""
        return 0

    def generator_state(self) -> torch.Tensor:
        """A copy of the state of its default generator, in host memory."""
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Put back what `generator_state` gave."""
        torch.set_rng_state(state)


class MemoryFigures(NamedTuple):
    """Bytes of an accelerator's memory now, and at most since the last reset.

    Allocated are the blocks in use, reserved are the segments that they are cut from, requested is what was asked for.
    """

    requested: int
    peak_requested: int
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


class Accelerator(Device):
    """A device whose work runs next to the host's, in streams, from memory that a caching allocator keeps."""

    GRANULE = 512

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device.type)

    def describe(self) -> str:
        """Its name, the version of its libraries, and the settings by which they choose kernels."""
        version = torch.version.hip or torch.version.cuda or getattr(torch.version, "xpu", None)
        kind = self.device.type
        name, power = self.module.get_device_name(self.device), power_limit(self.properties)
        return f"{kind} {name} torch {torch.__version__} {kind} {version} {flags()} power {power}"

    @property
    def properties(self) -> Any:
        """What torch tells of the device: its size, its cache, the number by which its driver knows it."""
        return self.module.get_device_properties(self.device)

    def synchronize(self) -> None:
        """Wait for all of its streams."""
        self.module.synchronize(self.device)

    def guard(self) -> AbstractContextManager[Any]:
        """Makes it the current device; the one from before is current afterwards."""
        return self.module.device(self.device)  # type: ignore[no-any-return]

    def elapsed_ns(self, run: Callable[[], Any], before: Callable[[], Any]) -> float:
        """Between two events in the computing stream.

        What `before` issues keeps the device at work while the host launches the rest: within a step launches are
        issued ahead, so that their latency is no kernel's cost.
        """
        stream = self.computing_stream()
        start, end = (self.module.Event(enable_timing=True) for _ in range(2))
        before()
        start.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6

    @property
    def cache_bytes(self) -> int:
        """Its second-level cache."""
        return int(getattr(self.properties, "L2_cache_size", 0)) or USUAL_CACHE_BYTES

    def capturing(self) -> bool:
        """Whether the computing stream is being captured: nothing may wait then, nor set a generator."""
        return bool(self.module.is_current_stream_capturing()) if self.device.type == "cuda" else False

    def watch(self) -> Watch:
        """By the allocator's figures, whose peak is reset at each cut."""
        return _AcceleratorWatch(self)

    def requested_bytes(self) -> int:
        """As its allocator was asked for them."""
        return int(self.memory().requested)

    def memory(self) -> MemoryFigures:
        """The allocator's figures."""
        found = self.module.memory_stats(self.device)
        kinds = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        return MemoryFigures(*(found.get(f"{kind}.all.{when}", 0) for kind in kinds for when in ("current", "peak")))

    def give_back(self) -> None:
        """Give what its allocator keeps, and nothing uses, back to the driver."""
        self.synchronize()
        self.module.empty_cache()

    def segments(self) -> list[dict[str, Any]]:
        """What its allocator has reserved, block by block, once what is free has been given back.

        Segments of other streams than the computing one are left out: its requests cannot be served from them.
        """
        self.give_back()
        index, stream = self.device.index, self.computing_stream().stream_id
        found = self.module.memory_snapshot()
        return [s for s in found if s["device"] == index and s["stream"] == stream]

    def take_workspaces(self) -> None:
        """Let the libraries take the workspaces that each thread keeps, the caller's and autograd's."""
        with torch.enable_grad(), self.guard():
            x = torch.ones(8, 8, device=self.device, requires_grad=True)
            torch.nn.functional.linear(x, x, x[0]).matmul(x).sum().backward()  # type: ignore[no-untyped-call]

    def outside_bytes(self) -> int:
        """What is in use on it besides the allocator's segments: the driver's context, libraries, other processes."""
        free, total = self.free_and_total()
        return max(0, total - free - self.memory().reserved)

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that its driver could still give, and all that it has."""
        free, total = self.module.mem_get_info(self.device)
        return int(free), int(total)

    def reset_peaks(self) -> None:
        """From now on the peaks are those of what follows."""
        self.module.reset_peak_memory_stats(self.device)

    def generator_state(self) -> torch.Tensor:
        """The state of its default generator."""
        return self.module.get_rng_state(self.device)  # type: ignore[no-any-return]

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Set its default generator."""
        self.module.set_rng_state(state, self.device)

    def computing_stream(self) -> Any:
        """The stream in which this thread's kernels run."""
        return self.module.current_stream(self.device)

    def side_streams(self) -> tuple[Any, Any]:
        """Two streams besides the computing one, always the same: torch hands out 32 in turn, then those again."""
        return _side_streams(self)

    def inside(self, stream: Any) -> AbstractContextManager[Any]:
        """What is issued inside runs in that stream."""
        return self.module.stream(stream)  # type: ignore[no-any-return]

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes of the host's memory that copies to and from the device need not wait for."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pinned_bytes(self, size: int) -> int:
        """What the host gives for them: blocks are powers of two (aten/src/ATen/core/CachingHostAllocator.h)."""
        return 1 << max(0, size - 1).bit_length() if size else 0


def of(device: torch.device | str) -> Device:
    """A device; one without an index is the current one of its kind, as everywhere in torch."""
    device = torch.device(device)
    if device.type not in KINDS:
        return Device(device)
    if str(device) == device.type:
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    return _accelerator(device)


def storage_bytes(tensor: torch.Tensor, at_least: int = 0) -> int:
    """The bytes of a tensor's storage as the allocator of its device rounds them; the tensor may be fake."""
    granule = (Accelerator if tensor.device.type in KINDS else Device).GRANULE
    return -(-max(int(tensor.untyped_storage().nbytes()), at_least) // granule) * granule


def capturing() -> bool:
    """Whether what this thread issues to some accelerator that this process has used is being captured."""
    return any(device.capturing() for device in with_generators())


def accelerators(used: bool = False) -> list[Accelerator]:
    """All accelerators that torch finds; or those alone that this process has used."""
    found = []
    for kind in KINDS:
        module = torch.get_device_module(kind)
        if module.is_available() and (not used or module.is_initialized()):
            found += [_accelerator(torch.device(kind, index)) for index in range(module.device_count())]
    return found


def with_generators() -> list[Device]:
    """The host, and all accelerators that this process has used: no other generator has been drawn from."""
    return [of("cpu"), *accelerators(used=True)]


KINDS = ("cuda", "xpu")
"""Kinds of accelerators whose modules offer streams, events and an allocator's figures."""


NAMED = torch.device(KINDS[0], 0)
"""Where the tensors of a step lie that is captured for a device by its name."""


def here() -> torch.device:
    """The accelerator of this machine, or its CPU."""
    kind = next((kind for kind in KINDS if torch.get_device_module(kind).is_available()), None)
    return torch.device("cpu") if kind is None else torch.device(kind, 0)


AUTOCAST_KINDS = ("cpu", *KINDS)
"""Kinds of devices for which autocast may be on or off."""


@cache
def _accelerator(device: torch.device) -> Accelerator:
    return Accelerator(device)


@cache
def _side_streams(device: Accelerator) -> tuple[Any, Any]:
    return device.module.Stream(device.device), device.module.Stream(device.device)
