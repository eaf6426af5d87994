"""Whole cycles of jobs, measured small: inside the budget, as predicted, and equal to the job without plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.training.job import Setting, measured

CYCLES = [("AdamW foreach", Setting(3, True, True)), ("8-bit momentum", Setting())]


@pytest.mark.parametrize(("name", "setting"), CYCLES)
def test_a_cycle_stays_inside_its_budget(name: str, setting: Setting) -> None:
    found = measured(name, setting, layers=3, width=64, rows=512)
    assert found.equal
    assert found.of_budget <= 1
    assert 0.97 <= found.of_predicted <= 1.03


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cycle_of_a_pipeline_stays_inside_its_budgets(tmp_path: Path) -> None:
    """Its exit code says so; one row a rank."""
    sizes = ("--layers", "4", "--rows", "512", "--share", "0.7", "--out", str(tmp_path / "table.md"))
    command = (sys.executable, "-m", "benchmarks.training.pipelines", "1F1B", *sizes)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| 1F1B")]
    assert len(rows) == 2
    assert all("bitwise" in row for row in rows)
