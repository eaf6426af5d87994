"""The README's table: what training one model in each way needs, from the rows that were measured."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.training.draw import RESULTS

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
MODELS = {"gpt2": "GPT-2, 6 layers", "resnet50": "ResNet50"}
WAYS = {
    "checkpoint": "`torch.utils.checkpoint` per block",
    "selective": "selective checkpoints per block",
    "amb 0.8": "`activation_memory_budget` = 0.8",
    "amb 0.4": "`activation_memory_budget` = 0.4",
}


def table(rows: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """Peak, time and gradients of each way, next to remat's within the same peak."""
    lines = [
        "| model | way to train | peak, MiB | time | remat within that peak | gradients of the way |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for model, name in MODELS.items():
        plain = rows[model, "plain"]
        lines.append(f"| {name} | plain | {_mib(plain)} | 1.00 | {_time(rows, model, plain)} | – |")
        for way, said in WAYS.items():
            row = rows[model, way]
            cells = (said, _mib(row), f"{float(row['over_plain']):.2f}", _time(rows, model, row), _equal(row))
            lines.append("| | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mib(row: Mapping[str, str]) -> str:
    return f"{int(row['peak_bytes']) / 2**20:.0f}"


def _time(rows: Mapping[tuple[str, str], Mapping[str, str]], model: str, row: Mapping[str, str]) -> str:
    return f"{float(rows[model, row['remat_at_its_peak']]['over_plain']):.2f}"


def _equal(row: Mapping[str, str]) -> str:
    """Against plain training's; buffers are BatchNorm's, which blocks that run twice update twice."""
    if int(row["unequal_gradients"]):
        return f"off by {float(row['gradient_error']):.1g} of the largest"
    return "equal; buffers are not" if int(row["unequal_buffers"]) else "equal"


def measured(folder: Path = RESULTS) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of client.csv by model and way."""
    with (folder / "client.csv").open(newline="") as file:
        return {(row["model"], row["way"]): row for row in csv.DictReader(file)}


def replaced(text: str, found: str) -> str:
    """The README with this table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{found}\n\n{END}{after}"


def main() -> int:
    """Print the table; with --write, put it into the README, too."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.summary", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    parser.add_argument("--check", action="store_true", help="exit code 1 where README.md shows another one")
    given = parser.parse_args()
    found = table(measured())
    print(found)
    if given.check:
        return int(README.read_text() != replaced(README.read_text(), found))
    if given.write:
        README.write_text(replaced(README.read_text(), found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
