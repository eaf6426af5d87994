"""A table's file: one JSON line a row, with what it was measured on, appended as soon as it is known."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import machine

RESULTS = Path(__file__).parent.parent / "results"


def known(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def entered(path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the commit, the machine and its load, after it was appended to a file."""
    found = {**row, "commit": _commit(), "machine": str(machine("torch"))}
    with path.open("a") as file:
        file.write(json.dumps(found) + "\n")
    return found


def _commit() -> str:
    asked = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def mib(size: int | None) -> str:
    """Bytes for a table."""
    return "–" if size is None else f"{size / 2**20:.2f}"


def percent(share: float | None) -> str:
    """A share for a table, with its sign."""
    return "–" if share is None else f"{100 * share:+.2f} %"
