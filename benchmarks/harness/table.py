"""Tables as Markdown: whole, or on the screen and in a file row by row; and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.machine import machine


def row(cells: Iterable[object]) -> str:
    """One line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(columns: Sequence[str]) -> str:
    """The names of the columns and the line under them."""
    return f"{row(columns)}\n{row(['---'] * len(columns))}"


def table(columns: Sequence[str], body: Iterable[Iterable[object]]) -> str:
    """A whole table, without a newline at its end."""
    return "\n".join([head(columns), *map(row, body)])


def csv_text(rows: Sequence[Mapping[str, object]], columns: Iterable[str] = ()) -> str:
    """Rows as CSV, the columns in the order in which they come, these before the others; empty what a row lacks."""
    text = io.StringIO()
    known = dict.fromkeys((*columns, *(column for row in rows for column in row)))
    writer = csv.DictWriter(text, known, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class Report:
    """A table under a title, on the screen and in a file, each row as it comes; the end of the block ends it.

    Under it stands what it was measured on, with the versions of these packages.
    """

    def __init__(self, title: str, columns: Sequence[str], out: Path | None, *packages: str) -> None:
        self._title, self._columns, self._out, self._packages = title, columns, out, packages
        self._before, self._rows = machine(), 0

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._rows:
            cut = "" if kind is None else " The run was cut short."
            self.say(f"\n{machine(*self._packages).since(self._before)}.{cut}\n\n")

    def add(self, *cells: object) -> None:
        """One row."""
        if not self._rows:
            self.say(f"## {self._title}\n\n{head(self._columns)}\n")
        self._rows += 1
        self.say(row(cells) + "\n")

    def say(self, text: str) -> None:
        """More text, under the rows so far."""
        print(text, end="", flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(text)
