"""The table of models on a device that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.training.targets import MODELS, main

from remat.target.build import build, tracing_for
from remat.target.devices import target_of


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_any_size_are_there_at_once(name: str) -> None:
    """Nothing is allocated, and nothing is initialised: Llama-3-8B alone would take 16 GB."""
    from remat.device import NAMED

    with tracing_for(NAMED):
        built = build(MODELS[name], NAMED)
    parameters = sum(p.numel() for p in built.model.parameters())
    expected = {"GPT-2 medium": 354.8e6, "Llama-3-8B": 8.03e9, "SDXL U-Net": 2.567e9, "ViT-H/14": 632e6}
    assert parameters == pytest.approx(expected[name], rel=0.002)
    assert all(p.device == NAMED for p in built.model.parameters())


@pytest.mark.slow
def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--models", "GPT-2 medium", "--time-limit", "20", "--json", str(tmp_path / "found.json")])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| GPT-2 medium | 8 |")
    found = json.loads((tmp_path / "found.json").read_text())["GPT-2 medium"]
    assert found["device"] == target_of("h100").name
    assert found["overhead_range"][0] < found["answer"]["overhead"] < found["overhead_range"][1]
