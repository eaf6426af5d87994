"""Builds the stand-in against the torch that is installed, once for each state of its sources: 12 s on one core."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
BUILT = Path(__file__).parent / "build"


def library() -> Path:
    """The shared library, built if it is not there.

    Raises:
        RuntimeError: there is no compiler, or it refuses the sources.
    """
    sources = sorted(NATIVE.glob("*.*"))
    text = version("torch").encode() + b"".join(source.read_bytes() for source in sources)
    built = BUILT / f"standin-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        _compile(built)
    return built


def _compile(built: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("the stand-in needs a C++20 compiler: install g++ or clang++, or name one in CXX")
    found = find_spec("torch")  # not imported: the library must be loaded before torch is
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    BUILT.mkdir(exist_ok=True)
    for old in BUILT.glob("standin-*.so"):
        old.unlink()
    made = built.with_suffix(f".{os.getpid()}")
    flags = ["-O1", "-fPIC", "-shared", "-std=c++20", "-Wall", "-Wextra", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    include = ["-isystem", str(torch / "include"), "-isystem", str(torch / "include/torch/csrc/api/include")]
    link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    command = [compiler, *flags, *include, str(NATIVE / "standin.cpp"), "-o", str(made), *link]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-8000:]}")
    os.replace(made, built)
