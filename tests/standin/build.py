"""Builds the stand-in against the torch that is installed, once for each state of its sources: 12 s on one core."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import native

HERE = Path(__file__).parent


def library(folder: Path = HERE) -> Path:
    """The shared library, built in a folder if it is not there.

    Raises:
        RuntimeError: there is no compiler, or it refuses the sources.
    """
    source = HERE / "native" / "standin.cpp"
    headers = sorted(source.parent.glob("*.h"))
    return native.library(source, folder, headers, "include/torch/csrc/api/include", ("c10", "torch_cpu"))
