"""The API reference is complete: each public name has its page and an example, and the examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import remat
import remat_ir
import remat_solver

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"remat_ir": ("verify", "replay", "Graph", "Problem", "Plan", "Answer"), "remat_solver": ("solve",)}


def pages() -> set[str]:
    """The dotted names that the reference has, module by module, with their homes resolved."""
    text = (ROOT / "docs" / "reference.md").read_text()
    found = re.findall(r"^::: ([\w.]+)\n    options:\n      members: \[([^\]]*)\]", text, re.M)
    return {f"{home}.{name.strip()}" for home, names in found for name in names.split(",")}


def public() -> list[tuple[str, object]]:
    """Each public name of the client, of the verifier and of the solver's door, with what it is."""
    names = [(f"remat.{name}", getattr(remat, name)) for name in remat.__all__]
    for module, wanted in ELSEWHERE.items():
        names += [(f"{module}.{name}", getattr(importlib.import_module(module), name)) for name in wanted]
    return names


def test_every_public_name_has_a_page() -> None:
    """Under its own name, or where it lives."""
    there = {id(_named(name)) for name in pages()}
    assert [name for name, what in public() if id(what) not in there] == []


def _named(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_has_an_example() -> None:
    """In its docstring, where it runs as a doctest, or in a block of Python on a page."""
    blocks = [
        block
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    text = "\n".join(blocks)
    without = [
        name
        for name, what in public()
        if ">>>" not in (inspect.getdoc(what) or "") and not re.search(rf"\b{re.escape(name)}\b", text)
    ]
    assert without == []


TIERS = {remat_ir: (), remat_solver: pytest.mark.thorough, remat: pytest.mark.slow}
MODULES = [
    pytest.param(".".join(path.relative_to(home.parent).with_suffix("").parts), marks=tier)
    for package, tier in TIERS.items()
    for home in (Path(package.__path__[0]),)
    for path in sorted(home.rglob("*.py"))
    if ">>>" in path.read_text()
]
"""Every module with an example in a docstring."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As doctests, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.attempted
    assert not ran.failed
