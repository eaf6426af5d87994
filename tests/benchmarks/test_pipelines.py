"""Whole cycles of a pipeline, measured small: inside the ranks' budgets, as predicted, equal to those without plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cycle_of_a_pipeline_stays_inside_its_budgets(tmp_path: Path) -> None:
    """Its exit code says so; one row a rank."""
    sizes = ("--layers", "4", "--rows", "512", "--share", "0.7", "--out", str(tmp_path / "table.md"))
    command = (sys.executable, "-m", "benchmarks.training.pipelines", "1F1B", *sizes)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=root, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| 1F1B")]
    assert len(rows) == 2
    assert all("bitwise" in row for row in rows)
