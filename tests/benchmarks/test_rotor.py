"""Rotor's experiment in the small: every method runs, nothing is over its prediction, and the rows travel."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from benchmarks.models.stages import densenet, resnet
from benchmarks.training.rotor import ROWS, Row, draw, measured, read, summary, table


@pytest.mark.slow
def test_the_experiment(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    rows: list[Row] = []
    for model, stages in (
        ("resnet", resnet((2, 1), False, 4, 8)),
        ("bottleneck", resnet((2, 1), True, 4, 8)),
        ("densenet", densenet((2, 2), 4, 8)),
    ):
        rows += measured(model, "8 × 16²", stages, x, rounds=2)
    assert {row.method.split("-")[0] for row in rows} == {"plain", "sequential", "revolve", "rotor"}
    for row in rows:
        assert row.measured_bytes is not None
        assert row.measured_ms is not None
        assert row.measured_bytes <= row.predicted_bytes <= row.budget_bytes
        assert row.measured_ms > 0
    with (tmp_path / "rotor.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    groups = read(tmp_path / "rotor.csv")
    assert [row for group in groups for row in group] == rows
    summaries = [summary(group) for group in groups]
    # by prediction rotor is never behind: each sequential plan is one of its own
    assert all(s.gain_predicted >= -1e-3 and math.isfinite(s.gain_best) for s in summaries)
    assert table(summaries).count("\n") == 5
    draw(groups, tmp_path / "rotor.png")
    assert (tmp_path / "rotor.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_table_of_the_committed_rows() -> None:
    assert table([summary(rows) for rows in read(ROWS)]) in ROWS.with_suffix(".md").read_text()
