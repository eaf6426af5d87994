"""What decides how a device computes: settings, drivers, the processor; and how the errors of devices read."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch


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


@contextmanager
def of_generation(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, CUDA says that its device is of a generation, by which models choose kernels.

    A build of torch without CUDA has no answer.
    """
    before = torch.cuda.get_device_capability

    def answered(device: Any = None) -> tuple[int, int]:
        return capability

    torch.cuda.get_device_capability = answered
    try:
        yield
    finally:
        torch.cuda.get_device_capability = before


BENCHMARK = (
    "torch.backends.cudnn.benchmark is on: each thread tries convolutions out by itself, in the middle of a step and "
    "with the largest workspaces, and one that is computed again may use another algorithm; set it to False for exact "
    "bits and for a budget that holds"
)

ATOMICS = (
    "deterministic algorithms are off: kernels with atomic additions differ from run to run, with a plan and without; "
    "torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8 make runs comparable bit for bit"
)


ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": "is set: the host waits for each kernel, so that measured times are not those of training",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "is set: memory is not cached, and predictions of reserved bytes do not hold",
    "NVIDIA_TF32_OVERRIDE": "is set: libraries overrule the precision that torch asks for",
}


def risks() -> list[str]:
    """Settings under which budgets, times or bits may not hold on an accelerator: a sentence for each."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = [BENCHMARK] * torch.backends.cudnn.benchmark + [ATOMICS] * (not deterministic)
    found += [f"{name} {said}" for name, said in ENVIRONMENT.items() if os.environ.get(name, "0") != "0"]
    if "cudaMallocAsync" in os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")):
        found.append("backend:cudaMallocAsync is set: its segments are the driver's, and are not predicted")
    return found


def power_limit(properties: Any) -> str:
    """The power that a device may draw, as its driver says, which decides how fast it stays; "unknown" without one."""
    uuid = str(getattr(properties, "uuid", ""))
    return driver_says(f"GPU-{uuid}", "power.limit") or "unknown" if uuid else "unknown"


@cache
def driver_says(device: str, what: str) -> str:
    """An answer of NVIDIA's command-line tool about a device, or ""."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", "-i", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


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


USUAL_CACHE_BYTES = 32 * 2**20
"""Of a device that does not tell."""


def cpu_name() -> str:
    """The CPU's model, as Linux tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.machine()


@cache
def cpu_cache_bytes() -> int:
    """The size of the last cache level that a core has, as Linux tells."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        units = {"K": 2**10, "M": 2**20}
        return max(int(text[:-1]) * units[text[-1]] for text in (path.read_text().strip() for path in sizes))
    except (OSError, ValueError, KeyError, IndexError):
        return USUAL_CACHE_BYTES
