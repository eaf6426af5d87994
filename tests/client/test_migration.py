"""The page for who comes from other tools: what stands before and after runs, and gives the same gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
SECTIONS = ("From torch.utils.checkpoint", "From selective checkpointing", "From activation_memory_budget")


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
    head, *sections = PAGE.read_text().split("\n## ")
    (shared,) = _blocks(head)
    (section,) = [section for section in sections if section.startswith(title)]
    before, after = _blocks(section)
    assert len(after.strip().splitlines()) <= 5
    for one, other in zip(_gradients(shared, before), _gradients(shared, after), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.thorough
def test_a_graph_of_another_tool_is_solved(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = _blocks(PAGE.read_text().split("\n## From Checkmate")[1])
    exec(block, {})
    assert capsys.readouterr().out == "optimal 6\n"
