"""Graphs from and to networkx and node-link JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings

from drawn import examples, graphs
from remat_ir import Graph, InvalidData, from_node_link, graph_of, to_node_link
from remat_solver.exchange import from_networkx, to_networkx

SETTINGS = settings(max_examples=examples(80), deadline=None, derandomize=True)


def pair(**more: Any) -> dict[str, Any]:
    """Two nodes and a link."""
    return {
        "directed": True,
        "multigraph": False,
        "graph": {},
        "nodes": [{"id": "a", "cost": 1, "size": 2}, {"id": "b", "cost": 3, "size": 4}],
        "links": [{"source": "a", "target": "b"}],
        **more,
    }


@SETTINGS
@given(graph=graphs(whole=False))
def test_round_trips(graph: Graph) -> None:
    assert from_networkx(to_networkx(graph)) == graph
    text = json.dumps(to_node_link(graph))
    assert from_node_link(text) == graph
    assert from_networkx(nx.node_link_graph(json.loads(text), edges="links")) == graph


def test_what_the_papers_model_can_say_travels() -> None:
    graph = graph_of(
        [1, 2, 3],
        [4, 5, 6],
        [[], [0], [0, 1]],
        op_workspace_bytes=(0, 7, 0),
        keep=(2,),
        once=(1,),
        backward_from=2,
        fixed_bytes=9,
        op_names=("x", "y", "z"),
    )
    again = from_node_link(to_node_link(graph))
    assert again == graph
    assert again.op_names == graph.op_names


def test_checkmate_names() -> None:
    """cost_cpu, cost_ram, backward, integer ids."""
    graph = from_node_link(
        {
            "directed": True,
            "multigraph": False,
            "graph": {"name": "x"},
            "nodes": [
                {"name": "conv", "backward": False, "cost_cpu": 385, "cost_ram": 10, "id": 0},
                {"name": "loss", "backward": True, "cost_cpu": 1, "cost_ram": 4, "id": 1},
                {"name": "conv_backward", "backward": True, "cost_cpu": 390, "cost_ram": 10, "id": 2},
            ],
            "links": [{"source": 0, "target": 1}, {"source": 0, "target": 2}, {"source": 1, "target": 2}],
        }
    )
    assert graph == graph_of([385, 1, 390], [10, 4, 10], [[], [0], [0, 1]], backward_from=1)
    assert graph.op_names == ("conv", "loss", "conv_backward")


@pytest.mark.parametrize(("key", "source", "target"), [("edges", "source", "target"), ("links", "0", "1")])
def test_moccasin_names(key: str, source: str, target: str) -> None:
    """duration, out_cost, an order of its own, nodes that are called by name, and links keyed "0" and "1"."""
    graph = from_node_link(
        {
            "directed": True,
            "multigraph": False,
            "graph": {"order": [0, 2, 1], "source_node": 0},
            "nodes": [
                {"out_cost": 790, "param_cost": 0, "duration": 0, "name": 0},
                {"out_cost": 4920, "param_cost": 0, "duration": 7, "name": 1},
                {"out_cost": 1950, "param_cost": 0, "duration": 514, "name": 2},
            ],
            key: [{source: 0, target: 2}, {source: 2, target: 1}, {source: 0, target: 1}],
        }
    )
    assert graph == graph_of([0, 514, 7], [790, 1950, 4920], [[], [0], [0, 1]])


def test_the_nodes_own_order_where_it_is_topological() -> None:
    digraph = nx.DiGraph()
    for node in ("c", "a", "b"):
        digraph.add_node(node, cost=ord(node), size=1)
    digraph.add_edge("c", "b")
    assert from_networkx(digraph).op_names == ("c", "a", "b")
    digraph.add_edge("b", "a")
    assert from_networkx(digraph).op_names == ("c", "b", "a")
    assert from_networkx(digraph, order=["c", "b", "a"]).op_names == ("c", "b", "a")


def test_whole_numbers_however_written() -> None:
    digraph = nx.DiGraph()
    digraph.add_node(0, cost=np.int64(3), size=4.0)
    assert from_networkx(digraph) == graph_of([3], [4], [[]])


def test_other_attributes_on_request() -> None:
    digraph = nx.DiGraph()
    digraph.add_node(0, cost=1, size=2, joules=5, wire=6)
    assert from_networkx(digraph, cost="joules", size="wire") == graph_of([5], [6], [[]])


@pytest.mark.parametrize(
    ("change", "message", "pointer"),
    [
        ({"nodes": None}, "nodes must be an array, not null", "/nodes"),
        ({"nodes": []}, "links[0]: there is no node 'a' for its source", "/links/0/source"),
        ({"nodes": [], "links": []}, "the graph has no nodes", "/nodes"),
        ({"nodes": [1]}, "nodes[0] must be an object, not an integer", "/nodes/0"),
        ({"nodes": [{"cost": 1}]}, "nodes[0] needs an id", "/nodes/0"),
        ({"nodes": [{"id": [1]}]}, "nodes[0] needs an id", "/nodes/0"),
        ({"nodes": [{"id": "a"}, {"id": "a"}]}, "nodes[1]: there is another node 'a'", "/nodes/1"),
        ({"nodes": [{"id": "a", "size": 1}, {"id": "b"}]}, "node 'a' has none of the attributes cost", "/nodes"),
        ({"nodes": [{"id": "a", "cost": 1}, {"id": "b"}]}, "node 'a' has none of the attributes size", "/nodes"),
        ({"nodes": [{"id": "a", "cost": 1, "size": 1}, {"id": "b", "size": 1}]}, "node 'b' has no cost", "/nodes"),
        ({"nodes": [{"id": "a", "cost": 1.5, "size": 1}, {"id": "b"}]}, "not the float 1.5: multiply", "/nodes"),
        ({"nodes": [{"id": "a", "cost": -1, "size": 1}, {"id": "b"}]}, "node 'a': cost must be a whole", "/nodes"),
        ({"nodes": [{"id": "a", "cost": "1", "size": 1}, {"id": "b"}]}, "not a string", "/nodes"),
        ({"nodes": [{"id": "a", "cost": True, "size": 1}, {"id": "b"}]}, "not True", "/nodes"),
        (
            {"nodes": [{"id": "a", "cost": 1, "size": 1, "keep": 1}, {"id": "b", "cost": 1, "size": 1}]},
            "keep",
            "/nodes",
        ),
        ({"links": None}, "links must be an array, not null", "/links"),
        ({"links": ["x"]}, "links[0] must be an object, not a string", "/links/0"),
        ({"links": [{"source": "a"}]}, "links[0]: there is no node None for its target", "/links/0/target"),
        ({"links": [{"0": "a"}]}, "links[0]: there is no node None for its target", "/links/0/1"),
        ({"links": [{"source": "a", "0": "a", "1": "b"}]}, "links[0]: there is no node None", "/links/0/target"),
        (
            {"links": [{"source": "a", "target": "b"}] * 2},
            "links[1]: there is another link from 'a' to 'b'",
            "/links/1",
        ),
        (
            {"links": [{"source": "a", "target": "b"}, {"source": "b", "target": "a"}]},
            "the graph has a cycle: 'a' → 'b'",
            "/links",
        ),
        ({"directed": False}, "directed graph", "/directed"),
        ({"multigraph": True}, "without parallel edges", "/directed"),
        ({"graph": {"order": ["b", "a"]}}, "the order puts 'b' before 'a', which it reads", "/graph/order"),
        ({"graph": {"order": ["a"]}}, "the order lacks node 'b'", "/graph/order"),
        ({"graph": {"order": ["a", "a", "b"]}}, "order[1]: node 'a' is there twice", "/graph/order/1"),
        ({"graph": {"order": ["a", "c"]}}, "order[1]: there is no node 'c'", "/graph/order/1"),
        ({"graph": {"order": [["a"]]}}, "order[0]: there is no node ['a']", "/graph/order/0"),
        ({"graph": {"order": "ab"}}, "the graph's order must be an array, not a string", "/graph/order"),
    ],
)
def test_refused(change: dict[str, Any], message: str, pointer: str) -> None:
    with pytest.raises(InvalidData, match=re.escape(message)) as caught:
        from_node_link(json.dumps(pair(**change)))
    assert caught.value.pointer == pointer


def test_backward_must_be_a_suffix() -> None:
    nodes = [{"id": "a", "cost": 1, "size": 2, "backward": True}, {"id": "b", "cost": 3, "size": 4, "backward": False}]
    with pytest.raises(InvalidData, match="node 'b' is not marked backward, but 'a' before it is"):
        from_node_link(pair(nodes=nodes))


@pytest.mark.parametrize("digraph", [nx.Graph(), nx.MultiDiGraph()])
def test_other_kinds_of_graph(digraph: Any) -> None:
    with pytest.raises(InvalidData, match="directed"):
        from_networkx(digraph)


def test_what_a_digraph_cannot_say() -> None:
    two = Graph(op_cost_ns=(1,), op_inputs=((),), value_op=(0, 0), value_bytes=(1, 1))
    with pytest.raises(InvalidData, match="op 0 makes 2 values"):
        to_networkx(two)
    with pytest.raises(InvalidData, match="op 0 makes 0 values"):
        to_networkx(Graph(op_cost_ns=(1,), op_inputs=((),), value_op=(), value_bytes=()))
    with pytest.raises(InvalidData, match="op 0 makes an optional value"):
        to_networkx(Graph(op_cost_ns=(1,), op_inputs=((),), value_op=(0,), value_bytes=(1,), optional=(0,)))
