"""Whole cycles of jobs, measured small: inside the budget, as predicted, and equal to the job without a plan."""

from __future__ import annotations

import pytest
from benchmarks.training.job import Setting, measured

CYCLES = [("AdamW foreach", Setting(3, True, True)), ("8-bit momentum", Setting())]


@pytest.mark.parametrize(("name", "setting"), CYCLES)
def test_a_cycle_stays_inside_its_budget(name: str, setting: Setting) -> None:
    found = measured(name, setting, layers=3, width=64, rows=512)
    assert found.equal
    assert found.of_budget <= 1
    assert 0.97 <= found.of_predicted <= 1.03
