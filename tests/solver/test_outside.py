"""A method from another package: found by its entry point, and judged by the verifier as all are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from remat_ir import InvalidData, Problem, Status, plain_peak
from remat_solver import METHODS, solve
from solver.little import little_graph
from solver.processes import environment

CODE = """
from dataclasses import dataclass

from remat_ir import plain_plan, plan_of
from remat_solver import Incumbent, Method


@dataclass(frozen=True)
class Options:
    lie: bool = False


def run(incumbent: Incumbent, options: Options) -> None:
    graph = incumbent.problem.graph
    incumbent.offer(plan_of(graph, [0]) if options.lie else plain_plan(graph), "plainest")


PLAINEST = Method("plainest", "keeps everything", run, Options)
NUMBER = 3
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two entry points, laid where Python finds those of installed ones."""
    info = tmp_path / "plainest-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plainest\nVersion: 0\n")
    points = {"plainest": "plainest_method:PLAINEST", "no-method": "plainest_method:NUMBER", "gone": "not_there:X"}
    points |= {"other-name": "plainest_method:PLAINEST", "auto": "plainest_method:PLAINEST"}
    (info / "entry_points.txt").write_text("[remat.methods]\n" + "".join(f"{n} = {w}\n" for n, w in points.items()))
    (tmp_path / "plainest_method.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_its_plans_are_answers_once_they_are_verified(outside: Path) -> None:
    problem = Problem(little_graph(3, 9), plain_peak(little_graph(3, 9)))
    answer = solve(problem, method="plainest")
    assert answer.method == "plainest"
    assert answer.status is Status.OPTIMAL
    with pytest.raises(InvalidData, match="method 'plainest' has no option 'speed'; it has lie"):
        solve(problem, method="plainest", options={"speed": 1})


def test_a_plan_that_does_not_verify_is_dropped_and_the_answer_names_the_method(outside: Path, said: list[str]) -> None:
    problem = Problem(little_graph(3, 9), plain_peak(little_graph(3, 9)))
    lied = solve(problem, method="plainest", options={"lie": True})
    assert lied.plan is None
    assert lied.dropped_methods == ("plainest",)
    assert said


def test_what_is_no_method_is_refused_by_name(outside: Path) -> None:
    problem = Problem(little_graph(3, 9), 10**9)
    for name, why in {
        "no-method": "plainest_method:NUMBER is not a remat_solver.Method",
        "other-name": "is not a remat_solver.Method with the name 'other-name'",
        "gone": "cannot be loaded: No module named 'not_there'",
        "nowhere": "unknown method 'nowhere'; there are: auto, .*, gone, no-method, other-name, plainest",
    }.items():
        with pytest.raises(InvalidData, match=why):
            solve(problem, method=name)


def test_a_method_of_this_package_stays_what_it_is(outside: Path) -> None:
    graph = little_graph(3, 9)
    assert solve(Problem(graph, plain_peak(graph)), method="auto").method == "auto"
    assert METHODS["auto"].summary == "a plan at once, then search and proof side by side"


def test_the_command_line_finds_it(outside: Path) -> None:
    graph = little_graph(3, 9)
    file = outside / "graph.json"
    file.write_text(json.dumps(graph.to_json()))
    command = [sys.executable, "-c", "from remat.cli import main; main()", "solve", str(file), "--local"]
    command += ["--budget", "100%", "--method", "plainest", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "plainest"
