"""A solve begins when its kernels are there: the first one in an installation is as good as the second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import remat_ir
from remat_solver.deadline import Deadline
from solver.little import little_graph

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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(data), env=environment, capture_output=True, text=True,
        check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_first_solve_waits_for_its_kernels_and_counts_none_of_that(tmp_path: Path) -> None:
    """With an empty cache: it says what it waits for, and has its whole limit; one cut short names what did not run."""
    graph = little_graph(1, 80, rich=False)
    problem = remat_ir.Problem(graph, remat_ir.budget_at(graph, 0.6))
    said, log = _in_process(_FIRST, problem.to_json(), NUMBA_CACHE_DIR=str(tmp_path))
    limit, message = said["cancelled"]
    assert limit == "cancel"
    assert "still being compiled" in message
    assert "compiling the solver's kernels" in log
    cost, limit = said["first"]
    assert cost < said["greedy"]
    assert limit == "time"
    assert said["waited"] > 1  # it was waited for, and is in no `seconds`


@pytest.mark.thorough
def test_methods_that_run_no_kernel_wait_for_none() -> None:
    """What a method says of itself."""
    graph = remat_ir.graph_of([1] * 8, [10] * 8, [[], [0], [1], [2], [3], [4, 2], [5, 1], [6, 0]], backward_from=4)
    link = remat_ir.Link(10**9, 10**9)
    chain = remat_ir.Chain(
        forward_ns=(1, 1, 1), backward_ns=(2, 2, 2), activation_bytes=(1, 1, 1, 1), gradient_bytes=(1, 1, 1, 1),
        tape_bytes=(2, 2, 2), forward_workspace_bytes=(0, 0, 0), backward_workspace_bytes=(0, 0, 0),
    )  # fmt: skip
    problems = [remat_ir.Problem(graph, 50), remat_ir.Problem(graph.with_link(link), 50), remat_ir.Problem(chain, 9)]
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
