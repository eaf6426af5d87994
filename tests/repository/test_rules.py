"""Rules of this repository that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["remat", "remat_ir", "remat_solver"])
def test_exported_names_exist(package: str) -> None:
    """Everything in `__all__` is there, sorted and without doubles."""
    module = __import__(package)
    names = [n for n in getattr(module, "__all__", ()) if not n.startswith("__")]
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(module, name), f"{package}.{name}"


def test_thin_import() -> None:
    """`import remat, remat_ir` loads neither torch, solver, numpy nor a web framework."""
    code = (
        "import remat, remat_ir, sys;"
        "heavy = {'torch', 'numpy', 'remat_solver', 'remat_service', 'fastapi', 'highspy'} & set(sys.modules);"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_readme_commands_are_targets() -> None:
    """The README's make commands exist."""
    named = set(re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


CLIENT = ROOT / "client" / "remat"
ADAPTERS = {
    *(CLIENT / name for name in ("device.py", "device_flags.py")),
    *(CLIENT / "_compat" / name for name in ("tracing.py", "fake_cuda.py")),
}
"""The last two: the autocast of each kind, which a trace that an error ends may leave changed; a device made up."""
ACCELERATORS = {"accelerator", "cuda", "mps", "xpu"}


def accelerator_names(source: str) -> list[int]:
    """The lines that name a kind of accelerator: a module of torch, a method, a string outside of prose."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named = node.attr in ACCELERATORS or node.attr == "get_device_module"
        elif isinstance(node, ast.Import):
            named = any(set(alias.name.split(".")[1:]) & ACCELERATORS for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            named = parts[0] == "torch" and bool({*parts[1:], *(a.name for a in node.names)} & ACCELERATORS)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            named = node.value.split(":")[0] in ACCELERATORS | {"nccl"}
        else:
            continue
        if named:
            found.append(node.lineno)
    return found


def test_accelerators_are_named_in_one_module() -> None:
    """What depends on the kind of device goes through `remat.device`, and settings of it through `device_flags`."""
    paths = sorted(set(CLIENT.rglob("*.py")) - ADAPTERS)
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in accelerator_names(path.read_text())]
    assert found == [], "ask remat.device"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "import torch.cuda",
        "on = tensor.device.type == 'cuda'",
        "there = torch.device('cuda:1')",
        "torch.accelerator.current_stream()",
        "module = torch.get_device_module(kind)",
        "here = tensor.cuda()",
        "ready = backend == 'nccl'",
    ],
)
def test_a_planted_accelerator_is_found(line: str) -> None:
    """The search sees each way to write it, and lets prose be."""
    assert accelerator_names(f'"""cuda"""\nimport torch\n{line}\n') == [3]
    assert all(accelerator_names(adapter.read_text()) for adapter in ADAPTERS)


TESTS = sorted(p for p in (ROOT / "tests").rglob("*.py") if p.parent.name != "benchmarks")
TIMED = re.compile(
    r"^\s*assert\b.*(?:\b(?:time|monotonic|perf_counter|process_time|thread_time)\(\).*[<>]|[<>].*\btime\.\w+\(\)"
    r"|\.seconds <)",
    re.MULTILINE,
)
OPEN_TO_TESTS = {"benchmarks.graphs", "benchmarks.models"}
SHARE_TOOLS = {
    ROOT / "tests" / path
    for path in ("service/database.py", "client/ranks_cases.py", "standin/device.py", "walks/walk.py")
}
"""What measurements need too: a PostgreSQL server of one's own, the allocator's events of all threads, a compiler."""


def test_tests_take_only_graphs_and_models_from_the_benchmarks() -> None:
    """A measurement may change as it likes: only its own tests, in `tests/benchmarks`, import it."""
    found = {}
    for path in TESTS:
        imported = set(re.findall(r"(?:from|import) (benchmarks(?:\.\w+)*)", path.read_text()))
        allowed = OPEN_TO_TESTS | ({"benchmarks.harness"} if path in SHARE_TOOLS else set())
        found[str(path.relative_to(ROOT))] = {".".join(name.split(".")[:2]) for name in imported} - allowed
    assert not {path: names for path, names in found.items() if names}


def test_no_assertion_is_timed() -> None:
    """A busy machine fails no test; what is measured is in `benchmarks`."""
    assert TIMED.search("    assert time.monotonic() - begun < 5")
    assert TIMED.search("assert 1 < time.monotonic() - begun")
    assert TIMED.search("assert answer.seconds < 20")
    found = [f"{path.name}: {line[0].strip()}" for path in TESTS for line in TIMED.finditer(path.read_text())]
    assert [line for line in found if not line.startswith("test_rules.py")] == []


def test_backports_are_imported_where_they_are_installed() -> None:
    """A Python that has the module itself gets no package of that name: the import stands below its version."""
    parts = ("client", "service", "solver", "benchmarks", "tests")
    sources = sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))
    unasked = re.compile(r"^(?:from|import) backports\b", re.MULTILINE)
    assert unasked.search("import os\nfrom backports import zstd\n")
    assert [str(path.relative_to(ROOT)) for path in sources if unasked.search(path.read_text())] == []


SCRIPTS = ROOT / "service" / "remat_service" / "web" / "page" / "static"
_NO_CODE = re.compile(r'"(?:\\.|[^"\\])*"|`(?:\\.|[^`\\])*`|//.*|for \([^;]*;[^;]*;')


def test_the_scripts_of_the_page_are_formatted() -> None:
    """At most 120 characters and one statement a line, two spaces a level; that they run the page's tests see."""
    wrong = []
    for path in sorted(SCRIPTS.glob("*.js")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            indent = len(line) - len(line.lstrip())
            found = [
                (len(line) > 120, "too long"),
                ("\t" in line or line != line.rstrip(), "a tab, or space at its end"),
                (indent % 2, "an odd indentation"),
                (re.search(r";\s+[^\s})]", _NO_CODE.sub("", line)), "two statements"),
            ]
            wrong += [f"{path.name}:{number}: {what}" for is_wrong, what in found if is_wrong]
    assert wrong == []
