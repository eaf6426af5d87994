"""The command that plans what this machine could never hold, on a shape that is over in seconds."""

from __future__ import annotations

import json

import pytest
from benchmarks.training.large import main


@pytest.mark.slow
def test_a_shape_is_planned_without_being_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--layers", "2", "--width", "256", "--length", "128", "--dtype", "float32"]
    main([*size, "--share", "0.9", "--time-limit", "0", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert list(rows) == ["model", "capture", "group", "profile", "greedy"]
    assert rows["profile"]["signatures"] < rows["capture"]["kernels"]
    assert rows["greedy"]["status"] in ("feasible", "optimal")
