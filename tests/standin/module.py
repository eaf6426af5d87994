"""What `torch.cuda` answers when its devices are stand-ins."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

DEVICES = 2
TOTAL_BYTES = 80 * 2**30
CONTEXT_BYTES = 300 * 2**20
"""What a driver's context takes besides the allocator's segments."""
L2_BYTES = 2**20


def install(library: Any) -> None:
    """Put answers in the places of those functions that a build for the CPU cannot answer."""
    import torch

    from . import attention

    _private(torch, library)
    cuda: Any = torch.cuda
    cuda._initialized = True
    cuda.default_generators = tuple(torch.Generator("cuda") for _ in range(DEVICES))
    for name, answer in {**_devices(torch, library), **_streams(torch, library), **_memory(torch, library)}.items():
        setattr(cuda, name, answer)
    _storages(torch)
    attention.register()


def _private(torch: Any, library: Any) -> None:
    def exchange(device: int) -> int:
        before: int = library.standin_device()
        if device >= 0:
            library.standin_set_device(device)
        return before

    # each its own function of Python: Dynamo has a table of what it finds here, and those of ctypes have no hash
    answers = {
        "getDevice": lambda: int(library.standin_device()),
        "setDevice": lambda device: library.standin_set_device(device),
        "exchangeDevice": lambda device: exchange(device),
        "maybeExchangeDevice": lambda device: exchange(device),
        "getDeviceCount": lambda: DEVICES,
        "isInBadFork": lambda: False,
        "getCurrentRawStream": lambda device: int(library.standin_stream(device)),
        "synchronize": lambda: library.standin_synchronize(),
    }
    for name, answer in answers.items():
        setattr(torch._C, f"_cuda_{name}", answer)
    torch.cuda._exchange_device = lambda device: exchange(device)
    torch.cuda._maybe_exchange_device = lambda device: exchange(device)


def _index(torch: Any, device: Any = None) -> int:
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return int(torch.cuda.current_device() if found is None else found)


def _devices(torch: Any, library: Any) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: int(library.standin_device()),
        "set_device": lambda device: library.standin_set_device(_index(torch, device)),
        "synchronize": lambda device=None: _synchronize(library),
        "get_device_name": lambda device=None: "stand-in",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: bool(library.standin_capturing()),
        "get_device_properties": lambda device=None: _properties(_index(torch, device)),
        "mem_get_info": lambda device=None: _free_and_total(torch, device),
    }


def _synchronize(library: Any) -> None:
    if library.standin_capturing():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    library.standin_synchronize()


def _properties(device: int) -> Any:
    return SimpleNamespace(
        name="stand-in",
        total_memory=TOTAL_BYTES,
        L2_cache_size=L2_BYTES,
        uuid=f"0000000{device}",
        major=9,
        minor=0,
        multi_processor_count=1,
    )


def _free_and_total(torch: Any, device: Any) -> tuple[int, int]:
    reserved = torch.cuda.memory_stats(device)["reserved_bytes.all.current"]
    return TOTAL_BYTES - CONTEXT_BYTES - reserved, TOTAL_BYTES


def _memory(torch: Any, library: Any) -> dict[str, Any]:
    from .device import empty_cache, figures, segments

    def stats(device: Any = None) -> dict[str, int]:
        found = figures(_index(torch, device))
        kinds = ("allocated_bytes", "requested_bytes", "reserved_bytes")
        return {f"{kind}.all.{when}": found[2 * i + j] for i, kind in enumerate(kinds)
                for j, when in enumerate(("current", "peak"))}  # fmt: skip

    return {
        "empty_cache": empty_cache,
        "memory_snapshot": lambda: [found for index in range(DEVICES) for found in segments(index)],
        "set_per_process_memory_fraction": lambda share, device=None: library.standin_limit(
            _index(torch, device), ctypes.c_int64(int(share * TOTAL_BYTES))
        ),
        "memory_stats": stats,
        "reset_peak_memory_stats": lambda device=None: library.standin_forget_peaks(_index(torch, device)),
    }


def _streams(torch: Any, library: Any) -> dict[str, Any]:
    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
            self.device = torch.device("cuda", _index(torch, device))
            if number is None:
                self.stream = torch.Stream(self.device)
            else:
                self.stream = torch.Stream(stream_id=number, device_index=self.device.index, device_type=1)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            event.event.wait(self.stream)

        def wait_stream(self, other: Any) -> None:
            self.wait_event(other.record_event())

        def synchronize(self) -> None:
            self.stream.synchronize()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and (other.device, other.number) == (self.device, self.number)

        def __hash__(self) -> int:
            return hash((self.device, self.number))

        @property
        def number(self) -> int:
            return int(self.stream.stream_id)

        stream_id = number

    class Event:
        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self.event = torch.Event("cuda", enable_timing=True)

        def record(self, stream: Any = None) -> None:
            self.event.record((stream or current()).stream)

        def synchronize(self) -> None:
            self.event.synchronize()

        def wait(self, stream: Any = None) -> None:
            (stream or current()).wait_event(self)

        def elapsed_time(self, other: Any) -> float:
            return float(self.event.elapsed_time(other.event))

    def current(device: Any = None) -> Stream:
        index = _index(torch, device)
        return Stream(index, number=library.standin_stream(index))

    @contextlib.contextmanager
    def inside(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        index = stream.device.index
        before = library.standin_stream(index)
        library.standin_set_stream(index, stream.number)
        try:
            with torch.cuda.device(index):
                yield
        finally:
            library.standin_set_stream(index, before)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": inside,
        "current_stream": current,
        "default_stream": lambda device=None: Stream(_index(torch, device), number=0),
    }


def _storages(torch: Any) -> None:
    """Storages are cloned as tensors, and the host's memory need not be pinned."""
    clone, empty = torch.UntypedStorage.clone, torch.empty

    def cloned(self: Any) -> Any:
        if self.device.type != "cuda":
            return clone(self)
        source = empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return source.clone().untyped_storage()

    torch.UntypedStorage.clone = cloned
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
