"""All that depends on the kind of device, behind one small interface: the host with its CPU, or an accelerator.

A device is the one that tensors name, never the current one of a thread. `torch.cuda`, which is ROCm's too, and
`torch.xpu` offer the same functions (`torch.get_device_module`), so that one class serves all of them.
"""

from __future__ import annotations

import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from . import _compat


class Interval(NamedTuple):
    """A part of what was watched: its highest and its last count of bytes, above the count when watching began."""

    label: str
    peak_bytes: int
    left_bytes: int


class Watch(ABC):
    """The allocator of a device, watched while this thread works; one at a time is open in a thread."""

    @abstractmethod
    def start(self) -> None:
        """From now on."""

    @abstractmethod
    def cut(self, label: str) -> None:
        """An interval ends here, and the next one begins."""

    @abstractmethod
    def stop(self, label: str = "") -> list[Interval]:
        """Until now: all intervals, in order."""


class Device(ABC):
    """A device, as the tensors on it name it."""

    GRANULE = 1
    """The allocator rounds each request up to a multiple of so many bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def describe(self) -> str:
        """The kind of device and what else decides how long a kernel takes there, in words."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all that was issued to it has ended."""

    @abstractmethod
    def guard(self) -> AbstractContextManager[Any]:
        """Makes it the current device of this thread, for code that names no device."""

    @abstractmethod
    def elapsed_ns(self, run: Callable[[], Any]) -> float:
        """How long the device is busy with what a function issues."""

    @abstractmethod
    def watch(self) -> Watch:
        """A new watch on its allocator."""

    @abstractmethod
    def generator_state(self) -> torch.Tensor:
        """A copy of the state of its default generator, in host memory."""

    @abstractmethod
    def set_generator_state(self, state: torch.Tensor) -> None:
        """Put back what `generator_state` gave."""


class Host(Device):
    """The CPU, and any kind of device whose memory torch does not report."""

    def describe(self) -> str:
        """Its model and how many threads torch uses."""
        name = _cpu_name() if self.device.type == "cpu" else self.device.type
        return f"{self.device.type} {name} torch {torch.__version__} threads {torch.get_num_threads()}"

    def synchronize(self) -> None:
        """Nothing is under way."""

    def guard(self) -> AbstractContextManager[Any]:
        """Does nothing."""
        return nullcontext()

    def elapsed_ns(self, run: Callable[[], Any]) -> float:
        """By the thread's own clock where torch uses one thread: other work on the machine adds nothing to it."""
        clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
        start = clock()
        run()
        return clock() - start

    def watch(self) -> Watch:
        """By the allocator's own events; none of them while a profiler is at work (`_compat.recording`)."""
        return _HostWatch()

    def generator_state(self) -> torch.Tensor:
        """The state of the CPU's generator."""
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Set the CPU's generator."""
        torch.set_rng_state(state)


class MemoryFigures(NamedTuple):
    """Bytes of an accelerator's memory now, and at most since the last reset.

    Allocated are the blocks in use, reserved are the segments that they are cut from, requested is what was asked for.
    """

    allocated: int
    peak_allocated: int
    peak_reserved: int
    peak_requested: int


class Accelerator(Device):
    """A device whose work runs beside the host's, in streams, from memory that a caching allocator keeps."""

    GRANULE = 512

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device.type)

    def describe(self) -> str:
        """Its name, the version of its libraries, and the settings by which they choose kernels."""
        version = torch.version.hip or torch.version.cuda or getattr(torch.version, "xpu", None)
        kind = self.device.type
        return f"{kind} {self.module.get_device_name(self.device)} torch {torch.__version__} {kind} {version} {flags()}"

    def synchronize(self) -> None:
        """Wait for all of its streams."""
        self.module.synchronize(self.device)

    def guard(self) -> AbstractContextManager[Any]:
        """Makes it the current device; the one from before is current afterwards."""
        return self.module.device(self.device)  # type: ignore[no-any-return]

    def elapsed_ns(self, run: Callable[[], Any]) -> float:
        """Between two events in the computing stream."""
        stream = self.computing_stream()
        start, end = (self.module.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6

    def watch(self) -> Watch:
        """By the allocator's figures, whose peak is reset at each cut."""
        return _AcceleratorWatch(self)

    def memory(self) -> MemoryFigures:
        """The allocator's figures."""
        found = self.module.memory_stats(self.device)
        return MemoryFigures(
            found.get("allocated_bytes.all.current", 0),
            found.get("allocated_bytes.all.peak", 0),
            found.get("reserved_bytes.all.peak", 0),
            found.get("requested_bytes.all.peak", 0),
        )

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
        """Two streams beside the computing one, always the same: torch hands out 32 in turn, then those again."""
        return _side_streams(self)

    def inside(self, stream: Any) -> AbstractContextManager[Any]:
        """What is issued inside runs in that stream."""
        return self.module.stream(stream)  # type: ignore[no-any-return]

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes of the host's memory that copies to and from the device need not wait for."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _HostWatch(Watch):
    """One recording with marks in it: autograd gives each node of a backward pass the profiler of when it began."""

    def start(self) -> None:
        _compat.start_recording()

    def cut(self, label: str) -> None:
        _compat.mark(label)

    def stop(self, label: str = "") -> list[Interval]:
        found: list[Interval] = []
        now = worst = 0
        for event in (*_compat.stop_marked_recording(), label):
            if isinstance(event, int):
                now += event
                worst = max(worst, now)
            else:
                found.append(Interval(event, worst, now))
                worst = now
        return found


class _AcceleratorWatch(Watch):
    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._before = 0
        self._found: list[Interval] = []

    def start(self) -> None:
        self._device.synchronize()
        self._before, self._found = self._device.memory().allocated, []
        self._device.reset_peaks()

    def cut(self, label: str) -> None:
        self._device.synchronize()
        now = self._device.memory()
        self._found.append(Interval(label, now.peak_allocated - self._before, now.allocated - self._before))
        self._device.reset_peaks()

    def stop(self, label: str = "") -> list[Interval]:
        self.cut(label)
        return self._found


def of(device: torch.device | str) -> Device:
    """A device; one without an index is the current one of its kind, as everywhere in torch."""
    device = torch.device(device)
    if _class_of(device.type) is Host:
        return Host(device)
    if str(device) == device.type:
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    return _accelerator(device)


def storage_bytes(tensor: torch.Tensor, at_least: int = 0) -> int:
    """The bytes of a tensor's storage as the allocator of its device rounds them; the tensor may be fake."""
    granule = _class_of(tensor.device.type).GRANULE
    return -(-max(int(tensor.untyped_storage().nbytes()), at_least) // granule) * granule


def with_generators() -> list[Device]:
    """The host, and all accelerators that this process has used: no other generator has been drawn from."""
    found = [of("cpu")]
    for kind in KINDS:
        module = torch.get_device_module(kind)
        if module.is_available() and module.is_initialized():
            found += [of(f"{kind}:{index}") for index in range(module.device_count())]
    return found


KINDS = ("cuda", "xpu")
"""Kinds of accelerators whose modules offer streams, events and an allocator's figures."""


AUTOCAST_KINDS = ("cpu", *KINDS)
"""Kinds of devices for which autocast may be on or off."""


def flags() -> str:
    """Settings of this process that decide which kernels an accelerator's libraries choose, on one line.

    Precisions are read as `fp32_precision`: `allow_tf32` raises where the process has set them by that name.
    """
    backends: Any = torch.backends
    names = {
        "cudnn": backends.cudnn.version(),
        "benchmark": backends.cudnn.benchmark,
        "deterministic": backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "convolution": backends.cudnn.conv.fp32_precision,
        "matmul": backends.cuda.matmul.fp32_precision,
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default"),
    }
    return " ".join(f"{name} {value}" for name, value in names.items())


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or a library on it, got no memory.

    The CPU's allocator and the libraries raise plain RuntimeErrors. cuDNN says that it finds no engine where none gets
    the workspace that it asks for.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)


_NO_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "unable to find an engine")


def device_failed(error: BaseException) -> bool:
    """Whether an error is the device's or about memory, not about what a kernel was given."""
    return isinstance(error, torch.AcceleratorError) or out_of_memory(error) or "CUDA error" in str(error)


def of_messages(group: Any) -> torch.device:
    """Where the messages of a process group have to lie: on the host where its backend takes them from there."""
    import torch.distributed as dist

    taken = dist.Backend.backend_capability.get(dist.get_backend(group), ["cpu"])
    if "cpu" in taken:
        return torch.device("cpu")
    bound = getattr(group or dist.group.WORLD, "bound_device_id", None)
    return bound or torch.device(taken[0])


def _class_of(kind: str) -> type[Device]:
    return Accelerator if kind in KINDS else Host


@cache
def _accelerator(device: torch.device) -> Accelerator:
    return Accelerator(device)


@cache
def _side_streams(device: Accelerator) -> tuple[Any, Any]:
    return device.module.Stream(device.device), device.module.Stream(device.device)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.machine()
