"""Three of the recipes: what people write around a model, by plans as by `aot_eager`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from recipes.training import Training, compared


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop:fp16_with_scaler", "accelerate_loop", "lightning_modules:mixed"])
def test_a_recipe_trains_as_by_aot_eager(name: str, tmp_path: Path) -> None:
    script, _, variant = name.partition(":")
    module = importlib.import_module(f"recipes.{script}")
    arguments = (variant,) if variant else ()
    found = compared(lambda training: module.train(training, *arguments), str(tmp_path))
    assert found.faults == ()


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
