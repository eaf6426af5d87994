"""The problem key: what is in it changes it, and nothing else does."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from drawn import examples, problems
from remat_ir import Graph, Link, Problem, graph_digest, graph_of, problem_digest, structure_digest

SETTINGS = settings(max_examples=examples(80), deadline=None, derandomize=True)
GRAPH = Graph(
    op_cost_ns=(1, 2, 3),
    op_inputs=((), (0,), (1, 2)),
    value_op=(0, 1, 1, 2),
    value_bytes=(5, 6, 7, 8),
    op_workspace_bytes=(0, 1, 0),
    optional=(2,),
    once=(1, 2),
    keep=(3,),
    backward_from=2,
    fixed_bytes=100,
)
IN = {
    "op_cost_ns": (1, 2, 4),
    "op_inputs": ((), (0,), (1,)),
    "value_op": (0, 0, 1, 2),
    "value_bytes": (5, 6, 7, 9),
    "op_workspace_bytes": (0, 1, 1),
    "optional": (),
    "once": (2,),
    "keep": (),
    "consumes": (1,),
    "backward_from": None,
    "link": Link(1, 2),
}


@pytest.mark.parametrize("field", IN)
def test_what_is_in(field: str) -> None:
    other = replace(GRAPH, **{field: IN[field]})
    assert graph_digest(other) != graph_digest(GRAPH)
    assert problem_digest(Problem(other, 200)) != problem_digest(Problem(GRAPH, 200))
    assert (structure_digest(other) == structure_digest(GRAPH)) == (field == "op_cost_ns")


def test_the_budget_is_in() -> None:
    assert problem_digest(Problem(GRAPH, 200)) != problem_digest(Problem(GRAPH, 201))


def test_names_are_out() -> None:
    named = replace(GRAPH, op_names=("a", "b", "c"), value_names=("p", "q", "r", "s"))
    assert problem_digest(Problem(named, 200)) == problem_digest(Problem(GRAPH, 200))


def test_every_field_is_decided() -> None:
    """A field added to Graph must be put in or left out on purpose."""
    assert set(Graph.__dataclass_fields__) == {*IN, "fixed_bytes", "op_names", "value_names"}


@SETTINGS
@given(problem=problems())
def test_fixed_bytes_shift_the_budget_and_nothing_else(problem: Problem) -> None:
    graph = problem.graph
    more = Problem(graph.with_fixed(graph.fixed_bytes + 17), problem.budget_bytes + 17)
    assert problem_digest(more) == problem_digest(problem)
    assert graph_digest(more.graph) == graph_digest(graph)
    assert re.fullmatch("[0-9a-f]{64}", problem_digest(problem))


def test_the_key_stands_still() -> None:
    """Stores outlive processes: this value may only change together with the format version."""
    graph = graph_of([120, 80, 200], [1024, 4096, 256], [[], [0], [0, 1]], keep=(2,), backward_from=2)
    assert graph_digest(graph) == "a5e22b299eff3ba9e33ee7a8fc02eee2831cd039261a35d5ee57bf774d9d2ce2"
    assert problem_digest(Problem(graph, 6000)) == "67d7e91d52ef3f544d33b3f3e25d1d088d50d0164607fa762b23fb2725acfb8a"


@SETTINGS
@given(problem=problems())
def test_the_digest_is_made_as_the_page_on_certificates_says(problem: Problem) -> None:
    """`docs/proofs.md`, To write another checker."""
    graph = problem.graph
    members = ("backward_from", "keep", "once", "op_cost_ns", "op_inputs", "op_workspace_bytes")
    members += ("optional", "value_bytes", "value_op", *(("consumes",) if graph.consumes else ()))
    said = {"format": "remat-graph/1", "budget_bytes": problem.budget_bytes - graph.fixed_bytes}
    said |= {name: getattr(graph, name) for name in members}
    written = json.dumps(said, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert hashlib.sha256(written).hexdigest() == problem_digest(problem)
