"""The documents hold: their code runs, and what they name, list and quote is there."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import remat
import remat.distributed
import remat.errors
import remat.planning.memo  # so that every class of errors is there
import remat_ir
import remat_solver
from remat_ir import RematError

ROOT = Path(__file__).parents[2]
OURS = {"remat", "remat_ir", "remat_solver", "remat_service"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for part in ("client", "service", "solver") for path in sorted((ROOT / part).rglob("*.py"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}(?: title=[^\n]*)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_json_blocks_parse() -> None:
    """Every JSON block is JSON."""
    for page in PAGES:
        for block in blocks(page, "json"):
            json.loads(block)


def test_python_blocks_call_what_there_is() -> None:
    """Every Python block is Python; each name of ours in it exists, and takes the keywords that it is given."""
    for page in PAGES:
        for block in blocks(page, "python"):
            check_names(ast.parse(block, page.name), page)


def check_names(tree: ast.AST, page: Path) -> None:
    """Whether what a block calls is there; fails with the page's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _named(node).split(".")[0] in OURS:
            _resolved(_named(node))
        if isinstance(node, ast.Call) and _named(node.func).split(".")[0] in OURS:
            found = _resolved(_named(node.func))
            known = inspect.signature(found).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                given = {keyword.arg for keyword in node.keywords if keyword.arg}
                assert given <= set(known), f"{page}: {_named(node.func)} takes {sorted(known)}, not {sorted(given)}"


def _named(node: ast.expr) -> str:
    """The dotted name of an expression, or nothing."""
    if isinstance(node, ast.Attribute):
        before = _named(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _resolved(name: str) -> Any:
    module, *rest = name.split(".")
    found: Any = importlib.import_module(module)
    for i, part in enumerate(rest):
        if not hasattr(found, part):
            found = importlib.import_module(".".join([module, *rest[: i + 1]]))
        else:
            found = getattr(found, part)
    return found


def test_commands_are_those_there_are() -> None:
    """Every `remat` and `remat-service` command in a shell block exists and has the options that it is given."""
    importlib.import_module("remat.cli")
    homes = {"remat": "remat.cli.app", "remat-service": "remat_service.cli"}
    groups = {name: typer.main.get_command(importlib.import_module(home).app) for name, home in homes.items()}
    for page in PAGES:
        shown = [*blocks(page, "sh"), *re.findall(r"^\$ (.*)$", page.read_text(), re.MULTILINE)]
        for line in "\n".join(shown).replace("\\\n", " ").splitlines():
            check_command(line, groups, page)


def check_command(line: str, groups: dict[str, Any], page: Path) -> None:
    """Whether a line of a shell block is a command that there is, with its options; fails with the page's name."""
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:
        words.pop(0)
    if not words or words[0] not in groups or len(words) < 2 or words[1].startswith("-"):
        return
    group, rest = groups[words[0]], words[1:]
    while rest and rest[0] in getattr(group, "commands", {}):
        group = group.commands[rest.pop(0)]
    assert not getattr(group, "commands", None), f"{page}: there is no such command: {line}"
    known = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if word.startswith("-") and word != "-":
            assert word.split("=")[0] in known, f"{page}: {word} is no option of: {line}"


@pytest.mark.thorough
def test_the_research_quick_start_runs(tmp_path: Path) -> None:
    """From top to bottom: its first block proves an optimum, and a method of one's own is one."""
    code = "\n".join(blocks(ROOT / "docs" / "quickstart-research.md", "python"))
    code += "\nprint(PLAINEST.name, remat_solver.METHODS['auto'].name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("optimal"), done.stdout
    assert lines[1].startswith("Verdict"), done.stdout
    assert lines[2] == "(3, 5)"
    assert [line.split()[0] for line in lines[3:7]] == ["checkpoint-all", "chen-greedy", "milp", "auto"]
    assert lines[7] == "plainest auto"


def test_every_method_is_documented() -> None:
    """The page of methods names each one that there is."""
    page = (ROOT / "docs" / "methods.md").read_text()
    assert [name for name in remat_solver.METHODS if f"`{name}`" not in page] == []


def test_the_readme_shows_what_was_measured() -> None:
    """Its table is the one that the measured rows give."""
    check = [sys.executable, "-m", "benchmarks.training.summary", "--check"]
    assert subprocess.run(check, cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_nothing_is_installed_by_a_name_that_others_could_take() -> None:
    """Nothing is on an index yet: pages and messages name the clone."""
    assert [path for path in [*PAGES, *SOURCES] if re.search(r"install '?remat\b", path.read_text())] == []


def test_the_faq_quotes_messages_that_exist() -> None:
    """Each message of its table is in the code, as it is said."""
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))
    table = (ROOT / "docs" / "faq.md").read_text().partition("| message |")[2]
    quoted = [
        quote for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for quote in re.findall("`([^`]+)`", row)
    ]
    assert len(quoted) >= 10
    assert [quote for quote in quoted if quote not in code] == []


TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
COMMAND = re.compile(r"python -m (benchmarks[\w.]*)")


def test_tests_that_a_page_names_are_there() -> None:
    named = {(path, name) for page in PAGES for path, name in TEST.findall(page.read_text())}
    assert named
    assert [f"{path}::{name}" for path, name in sorted(named) if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_commands_that_a_page_names_are_there() -> None:
    named = {module for page in PAGES for module in COMMAND.findall(page.read_text())}
    assert named
    assert [module for module in sorted(named) if importlib.util.find_spec(module.rstrip(".")) is None] == []


ELSEWHERE = {"remat_ir": ("verify", "replay", "Graph", "Problem", "Plan", "Answer"), "remat_solver": ("solve",)}


def reference() -> set[str]:
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
    there = {id(_member(name)) for name in reference()}
    assert [name for name, what in public() if id(what) not in there] == []


def _member(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_has_an_example() -> None:
    """In its docstring, where it runs as a doctest, or in a block of Python on a page."""
    found = [re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) for page in PAGES]
    text = "\n".join(block for blocks_of_page in found for block in blocks_of_page)
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


def kinds(of: type[RematError] = RematError) -> list[type[RematError]]:
    """A class of errors, then what is derived from it, that a client meets, each before its own."""
    found = [
        each
        for each in sorted(of.__subclasses__(), key=lambda kind: kind.__name__)
        if each.__module__.split(".")[0] == "remat" or each.__module__ == "remat_ir.errors"
    ]
    return [kind for each in found for kind in (each, *kinds(each))]


def remedy(kind: type[RematError]) -> str:
    """What to do about a kind of error, by its own class."""
    return str(remat.errors.REMEDIES.get(kind) or vars(kind)["remedy"])


def row(kind: type[RematError]) -> str:
    """A kind's row of the table: the first sentence of its docstring, and its remedy."""
    first = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return f"| `{kind.__name__}` | {first} | {remedy(kind)} |"


def test_every_error_says_what_to_do() -> None:
    assert len(kinds()) >= 16
    for kind in kinds():
        assert remedy(kind).endswith("."), kind
        assert len(remedy(kind)) > 40, kind


def test_a_class_without_a_remedy_is_found() -> None:
    class Silent(remat.errors.ServiceError):
        """Says nothing of its own."""

    with pytest.raises(KeyError):
        remedy(Silent)


def test_the_page_has_the_table_of_the_classes() -> None:
    lines = ["| error | what it means | what to do |", "| --- | --- | --- |", *map(row, kinds())]
    text = (ROOT / "docs" / "faq.md").read_text()
    written = text.split("<!-- errors: begin -->\n\n")[1].split("\n\n<!-- errors: end -->")[0].split("\n")
    assert written == lines, "\n".join(lines)
