"""The tutorial runs from top to bottom as it stands, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def shape(text: str) -> list[str]:
    """Lines without their numbers: times and rounding differ between machines."""
    return [re.sub(r"\d[\d.]*", "#", line).rstrip() for line in text.strip().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of code prints what stands below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert [kind for kind, _ in blocks].count("python") >= 6
    names: dict[str, object] = {}
    printed = ""
    for kind, text in blocks:
        if kind == "text":
            assert shape(printed) == shape(text)
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, str(PAGE), "exec"), names)
        printed = out.getvalue()
