"""Graphs and programs of others on the command line: node-link files, model files, solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import highspy
import networkx as nx
import pytest
from benchmarks.graphs.instances import instance

from client.commands import remat as remat  # a fixture
from client.test_cli import chain_graph
from client.test_cli_chains import CHAIN
from remat.cli.app import BAD_INPUT
from remat.cli.show import percent
from remat_ir import Answer, Graph, Plan, Problem, budget_at, graph_of, to_node_link, verify
from remat_solver.exchange import from_networkx

GRAPH = graph_of(
    [3, 1, 4, 1, 5, 9, 2, 6],
    [9, 7, 9, 3, 2, 3, 2, 4],
    [[], [0], [1], [2], [2, 3], [1, 4], [0, 5], [6]],
    backward_from=4,
    op_names=tuple("abcdefgh"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(GRAPH.to_json(names=True)))
    return path


@pytest.mark.parametrize("form", ["mps", "lp"])
def test_a_model_goes_out_and_its_solution_comes_back(form: str, remat: Any, file: Path, tmp_path: Path) -> None:
    model, found, plan = tmp_path / f"model.{form}", tmp_path / "found.sol", tmp_path / "plan.json"
    assert remat("export", file, "--format", form, "-b", "80%", "-o", model).code == 0
    engine = highspy.Highs()
    engine.silent()
    engine.readModel(str(model))
    engine.run()
    engine.writeSolution(str(found), 0)
    ran = remat("import-solution", file, found, "-b", "80%", "-o", plan, "--json")
    assert ran.code == 0, ran.err
    answer, problem = Answer.from_json(ran.data), Problem(GRAPH, budget_at(GRAPH, 0.8))
    solved = remat("solve", file, "-b", "80%", "-m", "milp", "-g", 0, "--json", "-q").data
    verdict = verify(problem, Plan.from_json(json.loads(plan.read_text())))
    assert verdict.cost_ns == answer.cost_ns == solved["cost_ns"] == solved["bound_ns"]
    assert "feasible" in remat("import-solution", file, found, "-b", "80%").out


def test_a_solution_of_another_budget_is_one_line(remat: Any, file: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.sol"
    found.write_text("R_0_0 1\nR_77_0 1\n")
    ran = remat("import-solution", file, found, "-b", "80%")
    assert (ran.code, ran.out) == (BAD_INPUT, "")
    assert "another graph, budget, method or option" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("name", ["resnet-2", "random-10"])
def test_node_link_files_round_trip(name: str, remat: Any, tmp_path: Path) -> None:
    """Generated instances: out as node-link data, read by networkx, and back."""
    graph = instance(name)
    first, other, back = (tmp_path / f"{word}.json" for word in ("first", "other", "back"))
    first.write_text(json.dumps(graph.to_json()))
    assert remat("export", first, "--format", "node-link", "-o", other).code == 0
    assert from_networkx(nx.node_link_graph(json.loads(other.read_text()), edges="links")) == graph
    assert remat("export", other, "--format", "remat-graph/1", "-o", back).code == 0
    assert Graph.from_json(back.read_text()) == graph


def test_node_link_files_are_planned_like_any_other(remat: Any, file: Path, tmp_path: Path) -> None:
    """As public instances come: names of their own for costs and sizes, ids that are strings."""
    digraph = nx.DiGraph()
    for op, (cost, size) in enumerate(zip(GRAPH.op_cost_ns, GRAPH.value_bytes, strict=True)):
        digraph.add_node(f"n{op}", cost_cpu=cost, cost_ram=size, backward=op >= 4)
    digraph.add_edges_from((f"n{v}", f"n{op}") for op, inputs in enumerate(GRAPH.op_inputs) for v in inputs)
    other, plan = tmp_path / "public.json", tmp_path / "plan.json"
    other.write_text(json.dumps(nx.node_link_data(digraph, edges="links")))
    ran = remat("solve", other, "-b", "80%", "-o", plan, "--json", "-q")
    assert ran.code == 0, ran.err
    assert ran.data["digest"] == remat("solve", file, "-b", "80%", "--json", "-q").data["digest"]
    assert remat("verify", other, plan, "-b", "80%").out.startswith("valid")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--format", "gms", "-b", "80%"], "format of a program is one of mps, lp"),
        (["--format", "mps"], "a budget is needed"),
        (["--format", "lp", "-b", "80%", "-m", "auto"], "method must be one of milp"),
        (["--format", "node-link", "-b", "80%"], "takes no budget"),
        (["--format", "mps", "-b", "1"], "no plan fits"),
    ],
)
def test_refused_exports(words: list[str], says: str, remat: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = remat("export", file, *words, "-o", out)
    assert (ran.code, ran.out) == (BAD_INPUT, "")
    assert says in ran.err
    assert not out.exists()


def test_chains_have_no_model(remat: Any, tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(CHAIN.to_json()))
    assert "takes graphs only" in remat("export", path, "--format", "mps", "-b", "80%", "-o", "-").err
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(to_node_link(GRAPH) | {"links": [{"source": 0}]}))
    assert "links[0]: there is no node None for its target (at /links/0/target)" in remat("solve", bad, "-b", "1").err


def test_a_linear_network_is_answered_next_to_its_persistent_optimum(remat: Any, tmp_path: Path) -> None:
    """The baseline is a member of the answer, and a line of the table."""
    graph = chain_graph()
    path = tmp_path / "linear.json"
    path.write_text(json.dumps(graph.to_json()))
    told = remat("solve", path, "-f", "0.6", "--json", "-q").data
    rotor = remat("solve", path, "-f", "0.6", "-m", "rotor", "--json", "-q").data
    assert told["chain_cost_ns"] == rotor["cost_ns"] >= told["cost_ns"]
    out = remat("solve", path, "-f", "0.6", "-q").out
    line = f"persistent chain optimum {percent(rotor['overhead'])}, this plan {percent(told['overhead'])}"
    assert line in " ".join(out.split())
