"""A table's file: one JSON line a row, with what it was measured on, appended as soon as it is known."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.machine import commit, machine
from benchmarks.harness.rows import add_row, read_rows

RESULTS = Path(__file__).parent.parent / "results"


def entered(path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the commit, the machine and its load, after it was appended to a file."""
    found = {**row, "commit": commit() or "unknown", "machine": str(machine("torch"))}
    add_row(path, found)
    return found


def completed(given: argparse.Namespace, ways: Callable[[str], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a table of models, those that were missing entered: `ways` measures a model."""
    rows = read_rows(given.output)
    there = {(row["model"], row["size"]) for row in rows}
    for name in given.models:
        if (name, given.size) not in there:
            print(name, flush=True)
            torch._dynamo.reset()
            rows.append(entered(given.output, {"model": name, "size": given.size, "ways": ways(name)}))
    return rows


def mib(size: int | None) -> str:
    """Bytes for a table."""
    return "–" if size is None else f"{size / 2**20:.2f}"


def percent(share: float | None) -> str:
    """A share for a table, with its sign."""
    return "–" if share is None else f"{100 * share:+.2f} %"
