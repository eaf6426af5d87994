"""Graphs from and to networkx; files of them are node-link JSON, which `remat_ir.node_link` reads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import networkx as nx

from remat_ir import Graph, InvalidData
from remat_ir.node_link import graph_of_nodes, to_node_link

DiGraph: TypeAlias = Any
"""networkx.DiGraph, of which some stubs are generic and others not."""


def from_networkx(
    digraph: DiGraph, *, order: Sequence[Hashable] | None = None, cost: str | None = None, size: str | None = None
) -> Graph:
    """A graph in the papers' model: each node is an op that makes one value, each edge a read of it.

    Args:
        digraph: its nodes, its graph attributes, and `order`, `cost` and `size` as in `remat_ir.node_link`.

    Raises:
        InvalidData: not a simple digraph, or what `graph_of_nodes` refuses; the message names the node.

    >>> digraph = nx.DiGraph()
    >>> digraph.add_node("a", cost=3, size=8)
    >>> digraph.add_node("b", cost=5, size=2)
    >>> digraph.add_edge("a", "b")
    >>> from_networkx(digraph).op_cost_ns
    (3, 5)
    """
    if not isinstance(digraph, nx.DiGraph) or isinstance(digraph, nx.MultiDiGraph):
        raise InvalidData("the graph must be directed and have at most one edge from one node to another")
    nodes = dict(digraph.nodes(data=True))
    sources = {node: tuple(digraph.pred[node]) for node in nodes}
    return graph_of_nodes(nodes, sources, digraph.graph, order=order, cost=cost, size=size)


def to_networkx(graph: Graph) -> DiGraph:
    """The digraph of a graph in which every op makes exactly one value; `from_networkx` takes it back.

    Raises:
        InvalidData: as `remat_ir.to_node_link`.

    >>> from remat_ir import graph_of
    >>> to_networkx(graph_of([3, 5], [8, 2], [[], [0]])).edges
    OutEdgeView([(0, 1)])
    """
    return nx.node_link_graph(to_node_link(graph), edges="links")
