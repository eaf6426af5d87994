"""Three of the recipes: what people write around a model, by plans as by `aot_eager`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes.training import Training, compared

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["plain_loop:bf16_autocast", "accelerate_loop", "lightning_modules:mixed"])
def test_a_recipe_trains_as_by_aot_eager(name: str) -> None:
    command = (sys.executable, "-m", "recipes", "--here", name)
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert found.splitlines()[-1].startswith("equal |")


def test_what_differs_is_said(tmp_path: Path) -> None:
    def train(training: Training) -> None:
        for step in range(40):
            training.step(torch.tensor(float(training.planned and step == 7)))
        training.end("model", torch.nn.Linear(2, 2))

    faults = compared(train, str(tmp_path)).faults
    assert faults == (
        "loss 7 differs",
        "0 plans took over, 2 asked for",
        "nothing was planned, or no step of it was measured",
    )
