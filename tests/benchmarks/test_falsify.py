"""The falsifier: a method that lies is found, the instance is written out, and today's methods pass."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.falsify import Falsifier, Way, drawn_chain, drawn_graph, drawn_join, ways_for

from benchmarks import falsify
from remat_ir import Plan, Problem, budget_at, plain_peak, verify
from remat_solver import METHODS
from remat_solver.contradiction import LOG, Evidence, RaiseContradictions
from remat_solver.incumbent import Incumbent


def _lie(incumbent: Incumbent, options: object) -> None:
    incumbent.raise_bound(3 * incumbent.problem.subject.total_cost_ns, "liar")


def _deny(incumbent: Incumbent, options: object) -> None:
    incumbent.prove_infeasible("Nothing fits.", incumbent.problem.budget_bytes + 1)


@pytest.mark.parametrize("lie", [_lie, _deny])
def test_a_liar_is_found(lie: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A false bound or a false no of one method against the plan of another, in either order."""
    monkeypatch.setitem(METHODS, "liar", replace(METHODS["greedy"], name="liar", run=lie))
    monkeypatch.setattr(falsify, "ways_for", lambda problem: [Way("liar"), Way("checkpoint-all")])
    graph = drawn_graph(random.Random(5))
    problem = Problem(graph, plain_peak(graph))
    looked = Falsifier(60, 1, 0, tmp_path / "falsified")
    looked.look(Evidence(graph), [problem.budget_bytes])
    assert looked.found
    assert "liar" in looked.summary()
    instance = json.loads((tmp_path / "falsified" / "001.json").read_text())
    assert (
        verify(Problem.from_json(instance["problem"]), Plan.from_json(instance["plan"])).cost_ns == graph.total_cost_ns
    )


def test_a_solve_that_contradicts_itself_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A false bound that the method's own plan refutes ends the solve: it is noted, and the search goes on."""

    def both(incumbent: Incumbent, options: object) -> None:
        _lie(incumbent, options)
        METHODS["checkpoint-all"].run(incumbent, options)

    monkeypatch.setitem(METHODS, "liar", replace(METHODS["greedy"], name="liar", run=both))
    monkeypatch.setattr(falsify, "ways_for", lambda problem: [Way("liar")])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(LOG, "handlers", [RaiseContradictions()])
    graph = drawn_graph(random.Random(5))
    looked = Falsifier(60, 1, 0, tmp_path / "falsified")
    looked.look(Evidence(graph), [plain_peak(graph)])
    assert len(looked.found) == 1
    assert "a proof is wrong" in looked.found[0]


def test_every_method_and_engine_has_its_turn() -> None:
    """Of the kinds together all methods, and each engine of a method that has several."""
    draw = random.Random(1)
    said: set[str] = set()
    for subject in (drawn_graph(draw), drawn_chain(draw), drawn_join(draw)):
        said |= {str(way) for way in ways_for(Problem(subject, budget_at(subject, 0.7)))}
    assert {way.split()[0] for way in said} == set(METHODS)
    assert {"milp engine=highs", "milp engine=cbc", "staged"} <= said


@pytest.mark.slow
def test_a_minute_finds_nothing(tmp_path: Path) -> None:
    assert falsify.main(["--seconds", "60", "--instances", str(tmp_path / "falsified")]) == 0
