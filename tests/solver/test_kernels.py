"""Kernels: what is cached and when it is compiled again; a solve begins when they are there, or cannot be compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import remat_solver
from drawn import layered
from remat_ir import Chain, Link, Problem, budget_at, graph_of
from remat_solver import _numba, kernels, warm
from remat_solver.deadline import Deadline
from remat_solver.search import local
from solver.little import little_graph
from solver.processes import environment

_FIRST = """
import json, sys, time
import remat_ir, remat_solver
problem = remat_ir.Problem.from_json(json.load(sys.stdin))
until = time.monotonic() + 1
cancelled = remat_solver.solve(problem, method="auto", cancelled=lambda: time.monotonic() > until)
greedy = remat_solver.solve(problem, method="greedy")
began = time.monotonic()
first = remat_solver.solve(problem, method="search", time_limit_s=2)
waited = time.monotonic() - began - first.seconds
print(json.dumps({
    "cancelled": [cancelled.limit, cancelled.message], "greedy": greedy.cost_ns, "waited": waited,
    "first": [first.cost_ns, first.limit],
}))
"""
_LEAST = """
import json, sys
import remat_ir, remat_solver
from remat_solver import kernels
problem = remat_ir.Problem.from_json(json.load(sys.stdin))
remat_solver.solve(problem, method="least-budget", time_limit_s=1)
print(json.dumps(kernels.loaded()))
"""
_WITHOUT = """
import json, sys
import remat_ir, remat_solver
from remat_solver import METHODS, _numba
ran = []
for data in json.load(sys.stdin):
    problem = remat_ir.Problem.from_json(data)
    for method in METHODS.values():
        if not method.kernels and problem.kind in method.takes:
            remat_solver.solve(problem, method=method.name, time_limit_s=5)
            ran.append(method.name)
print(json.dumps([sorted(set(ran)), [kernel.py_func.__name__ for kernel in _numba.KERNELS if kernel.signatures]]))
"""


def _in_process(script: str, data: object, **variables: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(data), env=environment(**variables), capture_output=True,
        text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_first_solve_waits_for_its_kernels_and_counts_none_of_that(tmp_path: Path) -> None:
    """With an empty cache: it says what it waits for, and has its whole limit; one cut short names what did not run."""
    graph = little_graph(1, 80, rich=False)
    problem = Problem(graph, budget_at(graph, 0.6))
    said, log = _in_process(_FIRST, problem.to_json(), NUMBA_CACHE_DIR=str(tmp_path))
    limit, message = said["cancelled"]
    assert limit == "cancel"
    assert "still being compiled" in message
    assert "compiling the solver's kernels" in log
    cost, limit = said["first"]
    assert cost < said["greedy"]
    assert limit == "time"
    assert said["waited"] > 1  # it was waited for, and is in no `seconds`


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_least_budget_waits_for_its_kernels_at_any_budget(tmp_path: Path) -> None:
    """Also at one at which the plan without recomputations fits: it looks for smaller ones."""
    graph = little_graph(1, 80, rich=False)
    problem = Problem(graph, budget_at(graph, 1.0))
    loaded, _ = _in_process(_LEAST, problem.to_json(), NUMBA_CACHE_DIR=str(tmp_path))
    assert loaded


@pytest.mark.thorough
def test_methods_that_run_no_kernel_wait_for_none() -> None:
    """What a method says of itself."""
    graph = graph_of([1] * 8, [10] * 8, layered(4, read_inputs=False), backward_from=4)
    chain = Chain(
        forward_ns=(1, 1, 1), backward_ns=(2, 2, 2), activation_bytes=(1, 1, 1, 1), gradient_bytes=(1, 1, 1, 1),
        tape_bytes=(2, 2, 2), forward_workspace_bytes=(0, 0, 0), backward_workspace_bytes=(0, 0, 0),
    )  # fmt: skip
    problems = [Problem(graph, 50), Problem(graph.with_link(Link(10**9, 10**9)), 50), Problem(chain, 9)]
    (ran, compiled), _ = _in_process(_WITHOUT, [problem.to_json() for problem in problems])
    assert len(ran) > 12
    assert compiled == []


def test_what_is_waited_for_is_not_part_of_a_time_limit() -> None:
    """A deadline that is held neither runs nor passes."""
    deadline = Deadline(0.1)
    with deadline.held():
        before = deadline.remaining(), deadline.elapsed()
        time.sleep(0.2)
        assert (deadline.remaining(), deadline.elapsed()) == before
        assert not deadline.passed()


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
OURS = "from remat_solver._numba import kernel; njit = kernel()"


def assigned(imports: str, folder: Path) -> int:
    """How often a process that compiles a function assigns its standard streams."""
    variables = environment(NUMBA_CACHE_DIR=str(folder))
    variables.pop("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", None)
    script = WATCHED.format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.thorough
def test_compiling_leaves_the_streams_alone(tmp_path: Path) -> None:
    assert assigned("from numba import njit", tmp_path) > 0  # else this proves nothing: is colorama installed?
    assert assigned(OURS, tmp_path) == 0
    assert assigned("import numba\n" + OURS, tmp_path) == 0


def test_nobody_waits_for_a_compilation_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.loading().wait(300)
    monkeypatch.setattr(kernels, "_loaded", threading.Event())
    monkeypatch.setattr(local, "profile_of", None)  # what loading needs first
    kernels.loading.cache_clear()
    try:
        assert kernels.loading().wait(30)
        assert "could not be compiled" in caplog.text
        with pytest.raises(TypeError):  # the one who asks hears why
            remat_solver.solve(Problem(GRAPH, budget_at(GRAPH, 0.7)), method="search")
    finally:
        kernels.loading.cache_clear()


_CALLER = """
from remat_solver import _numba
from other import called
@_numba.kernel()
def kernel(x):
    return called(x)
if __name__ == "__main__":
    before = _numba.cached(kernel)
    print(kernel(1), before, _numba.cached(kernel))
"""
_CALLED = """
from remat_solver import _numba
@_numba.inner
def called(x):
    return x + {}
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a kernel and, in another module, what it calls."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "caller.py").write_text(_CALLER)
    (folder / "other.py").write_text(_CALLED.format(1))
    return folder


def _run(package: Path, *before: str, **variables: str) -> str:
    """What the kernel returns; whether it was in the cache before, and is after."""
    command, given = [*before, sys.executable, str(package / "caller.py")], environment(package, **variables)
    return subprocess.run(command, env=given, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.thorough
def test_a_kernel_is_compiled_anew_where_what_it_calls_has_changed(package: Path, tmp_path: Path) -> None:
    """numba's own cache knows the kernel's module alone, and goes on with what another module held."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert _run(package, **cache) == "2 False True\n"
    assert _run(package, **cache) == "2 True True\n"
    (package / "other.py").write_text(_CALLED.format(5))
    assert _run(package, **cache) == "6 False True\n"


@pytest.mark.thorough
def test_a_damaged_cache_is_compiled_again(package: Path, tmp_path: Path) -> None:
    """A file of code that ends in the middle, and an index that does."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for pattern, known in (("*.nbc", True), ("*.nbi", False)):
        _run(package, **cache)
        (file,) = (tmp_path / "cache").rglob(pattern)
        file.write_bytes(file.read_bytes()[:40])
        assert _run(package, **cache).startswith(f"2 {known} ")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="a mount namespace of its own needs root")
def test_where_nothing_can_be_written(package: Path, tmp_path: Path) -> None:
    """A cache that was filled is read; with none each process compiles for itself."""
    read_only = ("unshare", "-m", "sh", "-ec", 'mount --make-rprivate /; mount -o remount,bind,ro /; exec "$@"', "sh")
    cache, nowhere = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}, {"NUMBA_CACHE_DIR": "", "HOME": "/nonexistent"}
    assert _run(package, *read_only, **nowhere) == "2 False False\n"
    _run(package, **cache)
    assert _run(package, *read_only, **nowhere | cache) == "2 True True\n"


@pytest.mark.thorough
def test_every_kernel_is_loaded_and_none_is_left_to_the_first_who_needs_it() -> None:
    """Each module that has a kernel is imported by the solver, and each kernel is run."""
    kernels.load_all()
    assert kernels.loading().wait(60)
    folder = Path(remat_solver.__file__).parent
    named = sum(
        len(re.findall(r"^@(?:kernel\(.*\)|compiled)$", path.read_text(), re.MULTILINE))
        for path in folder.rglob("*.py")
    )
    assert named == len(_numba.KERNELS)
    assert warm.main(["--check"]) == 0
