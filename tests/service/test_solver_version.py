"""A solver whose source differs answers anew; one whose comments differ does not."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import remat_ir
import remat_solver
from remat_solver.version import solver_version
from service.serving import checked, hard_graph, posed, serving


@pytest.fixture
def greedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a method, in a copy of the solver that a service runs."""
    for package in (remat_solver, remat_ir):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, tmp_path / "solver" / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "solver"), *filter(None, sys.path)]))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # the copy's kernels would be compiled first
    return tmp_path / "solver" / "remat_solver" / "methods" / "heuristics.py"


@pytest.mark.thorough
def test_a_change_of_a_method_is_a_solve_and_one_of_a_comment_is_none(tmp_path: Path, greedy: Path) -> None:
    """What a method ended with counts for the same syntax tree alone; the plan stays, and is no worse."""
    problem = posed(hard_graph(20), 0.6)
    source, said, versions = greedy.read_text(), [], []
    docstring = re.search(r'^"""(.*)"""\n', source)
    commented = source.replace(docstring[0], '"""Another sentence."""\n# and a comment\n')
    for text in (source, commented, commented + "\n_UNUSED = 1\n", commented):
        greedy.write_text(text)
        with serving(tmp_path, workers=1) as own:
            versions.append(own.http.get("/v1/capabilities").json()["version"])
            for _ in range(2):
                status, answer = own.post(problem, method="greedy", time_limit_s=20)
                assert status == 200
                checked(problem, answer)
                said.append(answer["cache"])
    assert versions[0] == versions[1] == versions[3] != versions[2]
    assert said == ["miss", "hit", "hit", "hit", "miss", "hit", "hit", "hit"]


def test_the_version_names_the_solver_and_fits_its_column() -> None:
    """The package, a digest, and HiGHS."""
    assert re.fullmatch(r"[\w.]+\+[0-9a-f]{12}\.highs[\d.]+", solver_version())
    assert len(solver_version()) <= 50
