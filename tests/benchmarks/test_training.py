"""The client's benchmark runs, keeps what it measured, and its intervals hold what they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.models.zoo import build, named
from benchmarks.training.draw import interval, ratio

ROOT = Path(__file__).parents[2]


def test_an_interval_holds_the_median_and_not_the_outliers() -> None:
    found = interval([1.0, 1.1, 0.9, 1.05, 0.95, 9.0, 1.02, 0.98, 1.01, 0.99, 1.03])
    assert found.low <= found.median <= found.high < 9.0
    assert found == interval([1.0, 1.1, 0.9, 1.05, 0.95, 9.0, 1.02, 0.98, 1.01, 0.99, 1.03])
    assert ratio([], []) is None
    paired = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert paired is not None
    assert tuple(paired) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("name", ["convnext", "t5"])
def test_the_blocks_that_are_checkpointed_hold_most_of_a_model(name: str) -> None:
    assert name in named("full")
    subject = build(name)
    blocks = subject.block_modules(subject.model)
    inside = [id(part) for block in blocks for part in block.modules()]
    assert len(blocks) >= 2
    assert len(inside) == len(set(inside))


@pytest.mark.slow
def test_a_quick_run_measures_draws_and_is_not_repeated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.training", "--quick", "--models", "vit", "--rounds", "2"]
    command += ["--work", str(tmp_path)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    found = json.loads((tmp_path / "quick" / "vit.json").read_text())
    assert found["complete"]
    assert found["rounds"] == 2
    mine = {name: way for name, way in found["ways"].items() if name.startswith("remat") and "error" not in way}
    assert all(way["unequal_to_aot_eager"] == 0 for way in mine.values())
    assert all(way["peak_bytes"] <= way["budget_bytes"] * 1.01 for way in mine.values())
    assert "ViT" in (tmp_path / "quick" / "client.md").read_text()
    assert (tmp_path / "quick" / "client.png").stat().st_size > 10_000
    assert "measured before" not in first.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert "measured before" in again.stdout
