"""The falsifier: a method that lies is found, the instance is written out, and today's methods pass."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.solver import falsifier
from benchmarks.solver.falsifier import Falsifier, Way, drawn_chain, drawn_graph, drawn_join, ways_for

from benchmarks import falsify
from remat_ir import Link, Plan, Problem, budget_at, graph_of, plain_peak, verify
from remat_solver import METHODS
from remat_solver.contradiction import LOG, Evidence, RaiseContradictions
from remat_solver.incumbent import Incumbent
from remat_solver.transfers.bound import prove


def _lie(incumbent: Incumbent, options: object) -> None:
    incumbent.raise_bound(3 * incumbent.problem.subject.total_cost_ns, "liar")


def _deny(incumbent: Incumbent, options: object) -> None:
    incumbent.prove_infeasible("Nothing fits.", incumbent.problem.budget_bytes + 1)


@pytest.mark.parametrize("lie", [_lie, _deny])
def test_a_liar_is_found(lie: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A false bound or a false no of one method against the plan of another, in either order."""
    monkeypatch.setitem(METHODS, "liar", replace(METHODS["greedy"], name="liar", run=lie))
    monkeypatch.setattr(falsifier, "ways_for", lambda problem: [Way("liar"), Way("checkpoint-all")])
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


def test_a_bound_of_copies_that_take_too_long_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The relaxation of a graph with a link, as if copies took a thousand times as long, against a plan with moves."""

    def slow(incumbent: Incumbent, options: object) -> None:
        graph = incumbent.problem.graph
        slower = graph.with_link(replace(graph.link, to_host_bytes_per_s=10**6, to_device_bytes_per_s=10**6))
        there = Incumbent(replace(incumbent.problem, subject=slower), incumbent.deadline)
        for relaxed in prove(there, there.deadline):
            incumbent.raise_bound(relaxed.bound_ns, "transfer-bound")

    monkeypatch.setitem(METHODS, "liar", replace(METHODS["offload-only"], name="liar", run=slow))
    monkeypatch.setattr(falsifier, "ways_for", lambda problem: [Way("liar"), Way("transfers")])
    forward = [[i - 1] if i else [] for i in range(6)]
    backward = [[*([i - 1] if i else []), i, *([11 - 1 - i] if i < 5 else [])] for i in reversed(range(6))]
    graph = graph_of([1000] * 12, [100] * 12, [*forward, *backward], backward_from=6).with_link(Link(10**9, 10**9))
    looked = Falsifier(60, 2, 0, tmp_path / "falsified")
    looked.look(Evidence(graph), [400])
    assert looked.found
    assert "liar" in looked.summary()


def test_links_are_drawn() -> None:
    draw = random.Random(3)
    links = [drawn_graph(draw).link for _ in range(30)]
    assert 5 <= sum(link is not None for link in links) <= 20


def test_a_solve_that_contradicts_itself_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A false bound that the method's own plan refutes ends the solve: it is noted, and the search goes on."""

    def both(incumbent: Incumbent, options: object) -> None:
        _lie(incumbent, options)
        METHODS["checkpoint-all"].run(incumbent, options)

    monkeypatch.setitem(METHODS, "liar", replace(METHODS["greedy"], name="liar", run=both))
    monkeypatch.setattr(falsifier, "ways_for", lambda problem: [Way("liar")])
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


def test_no_seconds_no_solves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert falsify.main(["--seconds", "0.01", "--instances", str(tmp_path / "none")]) == 0
    assert "no contradiction" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_minute_finds_nothing(tmp_path: Path) -> None:
    assert falsify.main(["--seconds", "60", "--instances", str(tmp_path / "falsified")]) == 0
