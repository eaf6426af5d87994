"""The tutorial and the page for who comes from other tools run as they stand."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL, MIGRATION = DOCS / "tutorial.md", DOCS / "migration.md"
SECTIONS = ("From torch.utils.checkpoint", "From selective checkpointing", "From activation_memory_budget")


def shape(text: str) -> list[str]:
    """Lines without their numbers: times and rounding differ between machines."""
    return [re.sub(r"\d[\d.]*", "#", line).rstrip() for line in text.strip().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of code prints what stands below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", TUTORIAL.read_text(), re.M | re.S)
    assert [kind for kind, _ in blocks].count("python") >= 6
    names: dict[str, object] = {}
    printed = ""
    for kind, text in blocks:
        if kind == "text":
            assert shape(printed) == shape(text)
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, str(TUTORIAL), "exec"), names)
        printed = out.getvalue()


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python(?: title=[^\n]*)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _gradients(shared: str, block: str) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "migration"}
    exec(shared, names)
    names["x"].requires_grad_()
    exec(block, names)
    return [names["x"].grad, *(parameter.grad for parameter in names["model"].parameters())]


@pytest.mark.thorough
@pytest.mark.parametrize("title", SECTIONS)
def test_before_and_after_train_alike(title: str) -> None:
    head, *sections = MIGRATION.read_text().split("\n## ")
    (shared,) = _blocks(head)
    (section,) = [section for section in sections if section.startswith(title)]
    before, after = _blocks(section)
    assert len(after.strip().splitlines()) <= 5
    for one, other in zip(_gradients(shared, before), _gradients(shared, after), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.thorough
def test_a_graph_of_another_tool_is_solved(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = _blocks(MIGRATION.read_text().split("\n## From Checkmate")[1])
    exec(block, {})
    assert capsys.readouterr().out == "optimal 6\n"
