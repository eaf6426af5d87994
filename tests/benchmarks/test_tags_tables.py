"""The tables of tagged plans: what is in a file is not made again, and a promise that is not kept is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.rows import read_rows
from benchmarks.tags import graphs, inductor, models
from benchmarks.tags.__main__ import main


def test_there_are_42_problems_on_13_graphs() -> None:
    assert len(graphs.GRAPHS) == 13
    assert sum(map(len, graphs.GRAPHS.values())) == 42


def test_a_row_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["graphs", "--graphs", "checkmate-fcn8-b32", "--seconds", "1", "--output", str(tmp_path / "rows.jsonl")]
    main(asked)
    first = capsys.readouterr().out
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row["free_bound"] <= row["free"] <= row["tags"] + 1e-9
    assert row["tags_bound"] <= row["tags"]
    assert {"commit", "machine"} <= set(row)
    main(asked)
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1
    assert capsys.readouterr().out.strip() in first


def _plan(budget: int, measured: int, overhead: float, unequal: list[str]) -> dict[str, Any]:
    row = {"budget": budget, "promised": budget, "measured": measured, "overhead": overhead, "unequal": unequal}
    return row | {"again": 1, "seconds": [2.0]}


def test_what_is_not_kept_is_named() -> None:
    ways: dict[str, Any] = {"aot_eager": {"measured": 200, "unequal": [], "seconds": [1.0]}}
    ways |= {"90 %": _plan(180, 180, 0.01, []), "50 %": _plan(100, 99, 0.05, [])}
    said = models.shown([{"model": "m", "ways": ways}])
    assert "Every promise is kept." in said
    assert "2.00" in said
    for wrong, name in (
        (_plan(100, 101, 0.05, []), "off"),
        (_plan(100, 97, 0.05, []), "off"),
        (_plan(100, 99, 0.0, []), "not monotone"),
        (_plan(100, 99, 0.05, ["gradient w"]), "gradient w"),
    ):
        said = models.shown([{"model": "m", "ways": ways | {"50 %": wrong}}])
        assert "Every promise is kept." not in said
        assert name in said
    assert "no plan" in models.shown([{"model": "m", "ways": ways | {"40 %": {"budget": 80, "refused": "why"}}}])


def test_masks_that_differ_are_named() -> None:
    plain = {"measured": 100, "error": 0.0, "generator": True, "loss": True}
    other = plain | {"error": 0.9, "generator": False, "promised": 90}
    said = inductor.shown([{"model": "m", "ways": {"plain Inductor": plain, "50 %": other}}])
    assert said.count("**differ**") == 1
    assert "**differs**" in said
