"""Compiling leaves the process's streams alone, and nobody waits for a compilation that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import remat_solver
from remat_ir import Problem, budget_at
from remat_solver.search import compiler, local
from solver.little import little_graph

WATCHED = """
import sys, types
assigned = 0

class Watched(types.ModuleType):
    def __setattr__(self, name, value):
        global assigned
        assigned += self is sys and name in ("stdout", "stderr")
        super().__setattr__(name, value)

sys.__class__ = Watched
{imports}
njit(lambda x: max(x, 1))(2)
print(assigned)
"""
GRAPH = little_graph(1, 12, rich=False)
OURS = "from remat_solver._numba import njit"


def assigned(imports: str, folder: Path) -> int:
    """How often a process that compiles a function assigns its standard streams."""
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": paths}
    environment.pop("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", None)
    script = WATCHED.format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


def test_compiling_leaves_the_streams_alone(tmp_path: Path) -> None:
    assert assigned("from numba import njit", tmp_path) > 0  # else this proves nothing: is colorama installed?
    assert assigned(OURS, tmp_path) == 0
    assert assigned("import numba\n" + OURS, tmp_path) == 0


def test_nobody_waits_for_a_compilation_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.compiling().wait(120)
    monkeypatch.setattr(compiler, "_compiled", type(compiler._compiled)())
    monkeypatch.setattr(local, "profile_of", None)  # what the compiler thread needs first
    compiler.compiling.cache_clear()
    try:
        assert compiler.compiling().wait(30)
        assert "could not be compiled" in caplog.text
        with pytest.raises(TypeError):  # the one who asks hears why
            remat_solver.solve(Problem(GRAPH, budget_at(GRAPH, 0.7)), method="search")
    finally:
        compiler.compiling.cache_clear()
