"""The program as it was before: what this one must get along with, until a release takes its place."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

BEFORE = "e0bf4d28b715048a665801eaf93364667271461d"
"""The commit whose contract is kept and whose servers and workers run next to these; later, that of the last tag."""

_HERE = Path(__file__).parents[2]


def text_before(path: str) -> str:
    """A file of that commit."""
    return _git("show", f"{BEFORE}:{path}").decode()


def program_before(folder: Path) -> Path:
    """The packages of that commit, unpacked into a folder."""
    with tarfile.open(fileobj=BytesIO(_git("archive", BEFORE, "service", "solver"))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(_HERE), *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs a clone with its history: {done.stderr.decode()[:200]}")
    return done.stdout
