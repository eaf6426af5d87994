"""Rows as JSON lines, each appended as soon as it is known, so that a run that was stopped goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in order; a last line that was cut short is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row, in a line of its own also where a kill cut the last one short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        last = b"\n"
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
        # one write, so that a kill leaves whole lines or a last one cut short
        file.write((b"" if last == b"\n" else b"\n") + json.dumps(row).encode() + b"\n")
