"""Settings by which an accelerator's libraries choose kernels, what its driver says, and the errors that both raise."""

from __future__ import annotations

import os
import subprocess
from functools import cache
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


BENCHMARK = (
    "torch.backends.cudnn.benchmark is on: each thread tries convolutions out by itself, in the middle of a step and "
    "with the largest workspaces, and one that is computed again may use another algorithm; set it to False for exact "
    "bits and for a budget that holds"
)

ATOMICS = (
    "deterministic algorithms are off: kernels with atomic additions differ from run to run, with a plan and without; "
    "torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8 make runs comparable bit for bit"
)


def risks() -> list[str]:
    """Settings of this process under which budgets or bits may not hold on an accelerator: a sentence for each."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return [BENCHMARK] * torch.backends.cudnn.benchmark + [ATOMICS] * (not deterministic)


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
