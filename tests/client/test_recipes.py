"""Three of the recipes: what people write around a model, by plans as by `aot_eager`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from recipes.training import compared


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop:fp32", "accelerate_loop", "several_models:distillation"])
def test_a_recipe_trains_as_by_aot_eager(name: str, tmp_path: Path) -> None:
    script, _, variant = name.partition(":")
    module = importlib.import_module(f"recipes.{script}")
    arguments = (variant,) if variant else ()
    take_overs = getattr(module, "TAKE_OVERS", 2)
    found = compared(lambda training: module.train(training, *arguments), str(tmp_path), take_overs=take_overs)
    assert found.faults == ()
