"""What a figure was measured on: the machine, how busy it was, and the versions that count."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

RESULTS = ("benchmarks/results", "docs/papers.md")
"""What measurements write into the tree."""


@dataclass(frozen=True)
class Machine:
    """A machine at one moment.

    Attributes:
        date: in UTC.
        load: runnable processes, averaged over a minute; NaN where the system does not say.
        versions: Python's and those of the packages asked for.
    """

    date: str
    cores: int
    processor: str
    load: float
    versions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self._sentence(f"load average {self.load:.1f}")

    def since(self, before: Machine) -> str:
        """The same in words, with the load before and after a run."""
        return self._sentence(f"load average {before.load:.1f} before and {self.load:.1f} after")

    def _sentence(self, load: str) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions)
        return f"{self.cores} cores ({self.processor}), {load}; {versions}"


def machine(*packages: str) -> Machine:
    """This machine now, with the versions of some installed packages."""
    return Machine(
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        cores=os.cpu_count() or 1,
        processor=platform.machine(),
        load=round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else float("nan"),
        versions=(("Python", platform.python_version()), *((name, version(name)) for name in packages)),
    )


def commit() -> str:
    """The commit that is measured, with a "+" if the tree differs from it in more than results; or empty."""
    try:
        told = _git("rev-parse", "--short=7", "HEAD")
        differs = _git("diff", "--quiet", "HEAD", "--", ":/", *(f":(top,exclude){path}" for path in RESULTS))
    except OSError:
        return ""
    return told.stdout.strip() + ("+" if differs.returncode == 1 else "")


def _git(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
