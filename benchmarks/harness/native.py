"""Shared libraries in C++ against the torch that is installed, built once for each state of their sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


def library(
    source: Path, folder: Path, headers: Sequence[Path] = (), include: str = "include", link: Sequence[str] = ("c10",)
) -> Path:
    """The library of a source, in a folder `build`, built if it is not there.

    Args:
        folder: where `build` is.
        headers: what the source includes besides torch's.
        include: further headers of torch, as a folder of the package.
        link: libraries of torch.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
    """
    text = version("torch").encode() + b"".join(path.read_bytes() for path in sorted([source, *headers]))
    folder /= "build"
    built = folder / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"{source.stem}-*.so"):
            old.unlink(missing_ok=True)
        _compile(source, built, include, link)
    return built


def _compile(source: Path, built: Path, include: str, link: Sequence[str]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError(f"{source.name} needs a C++20 compiler: install g++ or clang++, or name one in CXX")
    found = find_spec("torch")  # not imported: a library may have to be loaded before torch is
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    made = built.with_suffix(f".{os.getpid()}")
    flags = ["-O1", "-fPIC", "-shared", "-std=c++20", "-Wall", "-Wextra", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    headers = ["-isystem", str(torch / "include"), "-isystem", str(torch / include)]
    libraries = [f"-L{torch / 'lib'}", *(f"-l{name}" for name in link), f"-Wl,-rpath,{torch / 'lib'}"]
    command = [compiler, *flags, *headers, str(source), "-o", str(made), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-8000:]}")
    os.replace(made, built)
