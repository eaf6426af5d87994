"""The rules of the house that no other tool holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for room in ("solver", "service", "client") for p in (ROOT / room).rglob("*.py"))
BANNED_CALLS = {"eval", "exec"}
GENERATES_CODE = {ROOT / "client" / "remat" / "lowering" / "codegen.py"}
"""Compiles source that it has written itself from a captured graph; nothing from a wire or a file gets there."""
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
TEST_TOOLS = {"hypothesis", "mock", "pytest", "unittest"}
BANNED_ATTRIBUTES = {("yaml", "load"), ("torch", "load"), ("torch", "save"), ("joblib", "load")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_code_in_data(path: Path) -> None:
    """No pickle, no eval, no yaml.load, no torch.load: what comes over a wire is never code."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {a.name.split(".")[0] for a in node.names} & BANNED_IMPORTS, f"{path}:{node.lineno}"
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in BANNED_IMPORTS, f"{path}:{node.lineno}"
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                allowed = path in GENERATES_CODE and function.id == "exec"
                assert allowed or function.id not in BANNED_CALLS, f"{path}:{node.lineno}: {function.id}()"
            elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                assert (function.value.id, function.attr) not in BANNED_ATTRIBUTES, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_test_tools_in_production(path: Path) -> None:
    """Nothing that ships needs a test's tools, mocks least of all."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not {name.split(".")[0] for name in names} & TEST_TOOLS, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_open_with_a_sentence(path: Path) -> None:
    """The first sentences of the modules read as a map."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"


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
ADAPTERS = {CLIENT / "device.py", CLIENT / "device_flags.py"}
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


@pytest.mark.parametrize("path", sorted(set(CLIENT.rglob("*.py")) - ADAPTERS), ids=lambda p: str(p.relative_to(CLIENT)))
def test_accelerators_are_named_in_one_module(path: Path) -> None:
    """What depends on the kind of device goes through `remat.device`, and settings of it through `device_flags`."""
    assert accelerator_names(path.read_text()) == [], f"{path}: ask remat.device"


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


TESTS = sorted((ROOT / "tests").rglob("*.py"))
OPEN_TO_TESTS = {"benchmarks.graphs", "benchmarks.models"}
SHARE_TOOLS = {ROOT / "tests" / path for path in ("service/database.py", "client/ranks_cases.py", "standin/build.py")}
"""What measurements need too: a PostgreSQL server of one's own, the allocator's events of all threads, a compiler."""


@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_take_only_graphs_and_models_from_the_benchmarks(path: Path) -> None:
    """A measurement may change as it likes: only its own tests, in `tests/benchmarks`, import it."""
    if path.parent.name == "benchmarks":
        return
    imported = set(re.findall(r"(?:from|import) (benchmarks(?:\.\w+)*)", path.read_text()))
    allowed = OPEN_TO_TESTS | ({"benchmarks.harness"} if path in SHARE_TOOLS else set())
    assert {".".join(name.split(".")[:2]) for name in imported} <= allowed, path
