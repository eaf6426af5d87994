"""A bad graph cannot be constructed or read, and the message names the place."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from drawn import examples, graphs
from remat_ir import Graph, InvalidData, RematError, graph_of
from remat_ir.document import Column, Member
from remat_ir.graph import GRAPH

SETTINGS = settings(max_examples=examples(80), deadline=None, derandomize=True)
LARGEST = 2**53

SMALL: dict[str, Any] = {
    "format": "remat-graph/1",
    "fixed_bytes": 0,
    "op_cost_ns": [120, 80, 200],
    "op_workspace_bytes": [0, 0, 64],
    "op_inputs": [[], [0], [0, 1]],
    "value_op": [0, 1, 2],
    "value_bytes": [1024, 4096, 256],
    "optional": [],
    "once": [],
    "keep": [2],
    "backward_from": 2,
}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    # lengths
    ({"op_cost_ns": [], "op_workspace_bytes": [], "op_inputs": []}, "graph has no ops", "/op_cost_ns"),
    ({"op_inputs": [[], [0]]}, "op_inputs has 2 entries where op_cost_ns has 3", "/op_inputs"),
    ({"op_workspace_bytes": [0]}, "op_workspace_bytes has 1 entries where op_cost_ns has 3", "/op_workspace_bytes"),
    ({"op_workspace_bytes": []}, "op_workspace_bytes has 0 entries where op_cost_ns has 3", "/op_workspace_bytes"),
    ({"value_bytes": [1, 2]}, "value_bytes has 2 entries where value_op has 3", "/value_bytes"),
    ({"op_names": ["a"]}, "op_names has 1 entries where op_cost_ns has 3", "/op_names"),
    ({"value_names": []}, "value_names has 0 entries where value_op has 3", "/value_names"),
    # numbers
    ({"op_cost_ns": [120, -1, 200]}, "op 1: cost_ns must not be negative", "/op_cost_ns/1"),
    ({"op_cost_ns": [120, LARGEST + 1, 0]}, "op 1: cost_ns must be at most 2^53", "/op_cost_ns/1"),
    ({"op_cost_ns": [LARGEST, 1, 0]}, "the sum of op_cost_ns overflows 2^53", "/op_cost_ns"),
    ({"op_cost_ns": [120, 1.0, 0]}, "op_cost_ns[1] must be an integer, not the float 1.0", "/op_cost_ns/1"),
    ({"op_cost_ns": [120, True, 0]}, "op_cost_ns[1] must be an integer, not a boolean", "/op_cost_ns/1"),
    ({"op_cost_ns": [120, "1", 0]}, "op_cost_ns[1] must be an integer, not a string", "/op_cost_ns/1"),
    ({"op_cost_ns": [120, None, 0]}, "op_cost_ns[1] must be an integer, not null", "/op_cost_ns/1"),
    ({"op_cost_ns": 7}, "op_cost_ns must be an array, not an integer", "/op_cost_ns"),
    ({"op_workspace_bytes": [0, 0, -5]}, "op 2: workspace_bytes must not be negative", "/op_workspace_bytes/2"),
    ({"value_bytes": [1, -2, 3]}, "value 1: bytes must not be negative", "/value_bytes/1"),
    ({"value_bytes": [LARGEST, 1, 1]}, "the sum of all bytes overflows 2^53", "/value_bytes"),
    ({"fixed_bytes": -1}, "fixed_bytes must not be negative", "/fixed_bytes"),
    ({"fixed_bytes": LARGEST}, "the sum of all bytes overflows 2^53", "/value_bytes"),
    ({"fixed_bytes": None}, "fixed_bytes must be an integer, not null", "/fixed_bytes"),
    # edges
    ({"value_op": [0, 1, 3]}, "value 2: value_op 3 is not an op (0 to 2)", "/value_op/2"),
    ({"value_op": [-1, 1, 2]}, "value 0: value_op -1 is not an op (0 to 2)", "/value_op/0"),
    ({"value_op": [1, 0, 2]}, "value 1: value_op 0 follows 1, but must not decrease", "/value_op/1"),
    ({"op_inputs": [[], [0], [0, 3]]}, "op 2: input 3 is not a value", "/op_inputs/2/1"),
    ({"op_inputs": [[], [0], [-1]]}, "op 2: input -1 is not a value", "/op_inputs/2/0"),
    ({"op_inputs": [[], [0], [0, 0]]}, "op 2: reads value 0 twice", "/op_inputs/2"),
    ({"op_inputs": [[], [1], [0]]}, "op 1: reads value 1, which op 1 makes", "/op_inputs/1/0"),
    ({"op_inputs": [[], [2], [0]]}, "op 1: reads value 2, which op 2 makes", "/op_inputs/1/0"),
    ({"op_inputs": [[], 0, [0]]}, "op_inputs[1] must be an array, not an integer", "/op_inputs/1"),
    ({"op_inputs": [[], [0.0], [0]]}, "op_inputs[1][0] must be an integer, not the float 0.0", "/op_inputs/1/0"),
    # sets
    ({"keep": [3]}, "keep[0]: 3 is not value 0 to 2", "/keep/0"),
    ({"optional": [0, -1]}, "optional[1]: -1 is not value 0 to 2", "/optional/1"),
    ({"once": [0, 3]}, "once[1]: 3 is not op 0 to 2", "/once/1"),
    ({"once": [1, 0]}, "once[1]: 0 follows 1, but must ascend", "/once/1"),
    ({"keep": [1, 1]}, "keep[1]: 1 follows 1, but must ascend", "/keep/1"),
    ({"optional": [2]}, "value 2 is both optional and keep", "/optional"),
    ({"backward_from": 3}, "backward_from 3 is not an op (0 to 2)", "/backward_from"),
    ({"backward_from": -1}, "backward_from must not be negative", "/backward_from"),
    ({"backward_from": 1.5}, "backward_from must be an integer, not the float 1.5", "/backward_from"),
    # members
    ({"format": "remat-graph/2"}, "graph must have format 'remat-graph/1', not 'remat-graph/2'", "/format"),
    ({"colour": "red"}, "graph has an unknown key 'colour'", "/colour"),
    ({"a/b~c": 1}, "graph has an unknown key 'a/b~c'", "/a~1b~0c"),
    ({"op_names": [1, 2, 3]}, "op_names[0] must be a string", "/op_names/0"),
]


def example(change: dict[str, Any]) -> dict[str, Any]:
    return {**SMALL, **change}


def test_the_example_reads() -> None:
    graph = Graph.from_json(SMALL)
    assert graph.to_json() == SMALL
    assert (graph.ops, graph.values, graph.total_cost_ns) == (3, 3, 400)
    assert graph.op_values == ((0,), (1,), (2,))
    assert graph.users == ((1, 2), (2,), ())


@pytest.mark.parametrize(("change", "message", "pointer"), WRONG, ids=[w[1] for w in WRONG])
def test_what_is_refused(change: dict[str, Any], message: str, pointer: str) -> None:
    for data in (example(change), json.dumps(example(change)), json.dumps(example(change)).encode()):
        with pytest.raises(InvalidData, match=re.escape(message)) as caught:
            Graph.from_json(data)
        assert caught.value.pointer == pointer


@pytest.mark.parametrize("key", ["op_cost_ns", "op_inputs", "value_op", "value_bytes"])
def test_a_missing_key(key: str) -> None:
    with pytest.raises(InvalidData, match=f"graph lacks the key '{key}'") as caught:
        Graph.from_json({k: v for k, v in SMALL.items() if k != key})
    assert caught.value.pointer == f"/{key}"


@pytest.mark.parametrize("key", ["op_workspace_bytes", "optional", "once", "keep", "fixed_bytes", "backward_from"])
def test_keys_that_may_be_absent(key: str) -> None:
    Graph.from_json({k: v for k, v in SMALL.items() if k != key})


def test_constructor_refuses_as_the_reader_does() -> None:
    """Booleans and floats are no integers, also where no JSON is read."""
    graph = Graph.from_json(SMALL)
    for change, message in (
        ({"op_cost_ns": (1, True, 2)}, "op 1: cost_ns must be an integer, not a boolean"),
        ({"value_bytes": (1.0, 2, 3)}, "value 0: bytes must be an integer, not the float 1.0"),
        ({"value_op": (0, 1, True)}, "value 2: value_op True is not an op"),
        ({"op_inputs": ((), (False,), ())}, "op 1: input False is not a value"),
        ({"keep": (True,)}, "keep[0]: True is not value 0 to 2"),
        ({"backward_from": True}, "backward_from True is not an op"),
        ({"fixed_bytes": 0.5}, "fixed_bytes must be an integer"),
    ):
        with pytest.raises(InvalidData, match=re.escape(message)):
            replace(graph, **change)


def test_over_long_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAPH.members, "op_cost_ns", Member(Column(cap=2)))
    monkeypatch.setattr("remat_ir.graph.MOST_OPS", 2)
    with pytest.raises(InvalidData, match="op_cost_ns has 3 entries, more than the 2 allowed") as caught:
        Graph.from_json(SMALL)
    assert caught.value.pointer == "/op_cost_ns"
    with pytest.raises(InvalidData, match="graph has 3 ops, more than the 2 allowed"):
        graph_of([1, 1, 1], [1, 1, 1], [[], [], []])
    monkeypatch.setitem(GRAPH.members, "op_cost_ns", Member(Column(cap=3)))
    monkeypatch.setattr("remat_ir.graph.MOST_INPUTS", 2)
    with pytest.raises(InvalidData, match="op_inputs has more than 2 entries in all"):
        Graph.from_json(SMALL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        (b"\xff", "not JSON: not UTF-8 at byte 0"),
        ('{"fixed_bytes": NaN}', "NaN is not a number that remat accepts"),
        ('{"fixed_bytes": -Infinity}', "-Infinity is not a number"),
        ('{"keep": [], "keep": []}', "key 'keep' appears twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "not JSON that remat reads"),
        ("[]", "graph must be an object, not an array"),
        ("null", "graph must be an object, not null"),
        ('"x"', "graph must be an object, not a string"),
    ],
)
def test_text_that_is_no_graph(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(message)):
        Graph.from_json(text)


def test_errors_are_remats_and_values() -> None:
    """Whoever catches ValueError, or RematError, catches it."""
    assert issubclass(InvalidData, RematError)
    assert issubclass(InvalidData, ValueError)


@SETTINGS
@given(graph=graphs())
def test_names_stay_at_home(graph: Graph) -> None:
    named = replace(
        graph,
        op_names=tuple(f"layer{op}" for op in range(graph.ops)),
        value_names=tuple(f"tensor{v}" for v in range(graph.values)),
    )
    assert named == graph
    assert "layer" not in json.dumps(named.to_json())
    again = Graph.from_json(named.to_json(names=True))
    assert (again.op_names, again.value_names) == (named.op_names, named.value_names)
    assert named.op_label(0) == "op 0 (layer0)"
    assert graph.op_label(0) == "op 0"


@SETTINGS
@given(graph=graphs())
def test_derived_columns_agree(graph: Graph) -> None:
    for value in range(graph.values):
        assert value in graph.op_values[graph.value_op[value]]
        assert (value in graph.op_always[graph.value_op[value]]) == (value not in graph.optional)
        assert graph.users[value] == tuple(op for op in range(graph.ops) if value in graph.op_inputs[op])
    assert graph.with_fixed(77).fixed_bytes == 77
