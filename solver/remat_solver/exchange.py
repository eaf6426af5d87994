"""The door for graphs that others made: networkx digraphs, and the node-link JSON in which public ones travel."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import networkx as nx

from remat_ir import Graph, InvalidData, graph_of
from remat_ir.read import LARGEST_INTEGER, array, kind, parse

DiGraph: TypeAlias = Any
"""networkx.DiGraph, of which some stubs are generic and others not."""

COSTS = ("cost", "cost_cpu", "duration")
"""What a node's cost is called: here, in Checkmate's graphs, in Moccasin's."""
SIZES = ("size", "cost_ram", "out_cost")
"""What the size of a node's output is called, in the same order."""


def from_networkx(
    digraph: DiGraph, *, order: Sequence[Hashable] | None = None, cost: str | None = None, size: str | None = None
) -> Graph:
    """A graph in the papers' model: each node is an op that makes one value, each edge a read of it.

    Args:
        digraph: nodes with a cost and a size, and maybe `workspace`, `keep`, `once`, `backward` (all backward nodes
            come after all others) and `name`; the graph attributes `order` and `fixed` may be there.
        order: the nodes in the order in which they run; else the graph's `order`; else the nodes' own order if it is
            topological; else the topological order that stays closest to it.
        cost, size: the attributes to read; else the first that is there of `COSTS` and `SIZES`.

    Raises:
        InvalidData: a cycle, a missing attribute, a number that is no whole non-negative number, an order that is
            none; the message names the node.
    """
    if not isinstance(digraph, nx.DiGraph) or isinstance(digraph, nx.MultiDiGraph):
        raise InvalidData("the graph must be directed and have at most one edge from one node to another")
    nodes = _order(digraph, digraph.graph.get("order") if order is None else order)
    cost, size = cost or _attribute(digraph, nodes, COSTS), size or _attribute(digraph, nodes, SIZES)
    position = {node: i for i, node in enumerate(nodes)}
    return graph_of(
        [_number(digraph, node, cost) for node in nodes],
        [_number(digraph, node, size) for node in nodes],
        [sorted(position[source] for source in digraph.pred[node]) for node in nodes],
        op_workspace_bytes=tuple(_number(digraph, node, "workspace", 0) for node in nodes),
        keep=tuple(i for i, node in enumerate(nodes) if _flag(digraph, node, "keep")),
        once=tuple(i for i, node in enumerate(nodes) if _flag(digraph, node, "once")),
        backward_from=_backward(digraph, nodes),
        fixed_bytes=_whole(digraph.graph.get("fixed", 0), "the graph's fixed"),
        op_names=tuple(str(digraph.nodes[node].get("name", node)) for node in nodes),
    )


def to_networkx(graph: Graph) -> DiGraph:
    """The digraph of a graph in which every op makes exactly one value; `from_networkx` takes it back.

    Nodes are op indices with `cost`, `size`, and `name`, `workspace`, `keep`, `once`, `backward` where there is
    something to say.

    Raises:
        InvalidData: an op makes no value or several, or an optional one: a digraph can't say that.
    """
    for op, values in enumerate(graph.op_values):
        if len(values) != 1:
            raise InvalidData(
                f"{graph.op_label(op)} makes {len(values)} values; in a digraph each node has exactly one"
            )
    if graph.optional:
        op = graph.value_op[graph.optional[0]]
        raise InvalidData(f"{graph.op_label(op)} makes an optional value; a digraph has none")
    digraph: DiGraph = nx.DiGraph(order=list(range(graph.ops)), fixed=graph.fixed_bytes)
    keep, once = {graph.value_op[value] for value in graph.keep}, set(graph.once)
    for op in range(graph.ops):
        data: dict[str, Any] = {"cost": graph.op_cost_ns[op], "size": graph.value_bytes[graph.op_values[op][0]]}
        if graph.op_names is not None:
            data["name"] = graph.op_names[op]
        if graph.op_workspace_bytes[op]:
            data["workspace"] = graph.op_workspace_bytes[op]
        if op in keep:
            data["keep"] = True
        if op in once:
            data["once"] = True
        if graph.backward_from is not None:
            data["backward"] = op >= graph.backward_from
        digraph.add_node(op, **data)
    for op, inputs in enumerate(graph.op_inputs):
        digraph.add_edges_from((graph.value_op[value], op) for value in inputs)
    return digraph


def from_node_link(data: object, *, order: Sequence[Hashable] | None = None) -> Graph:
    """Read node-link JSON, or its text: `nodes` with ids and numbers, `links` (or `edges`) with source and target.

    A node is called by its `id`, or by its `name` where it has none.

    Raises:
        InvalidData: malformed in any way; the message and the pointer name the place.
    """
    if isinstance(data, (str, bytes)):
        data = parse(data)
    if not isinstance(data, Mapping):
        raise InvalidData(f"node-link data must be an object, not {kind(data)}")
    if data.get("directed") is False or data.get("multigraph") is True:
        raise InvalidData("node-link data must be of a directed graph without parallel edges", "/directed")
    about = data.get("graph", {})
    digraph: DiGraph = nx.DiGraph()
    digraph.graph.update(about if isinstance(about, Mapping) else {})
    for i, node in enumerate(array(data.get("nodes"), "nodes", "/nodes")):
        if not isinstance(node, Mapping):
            raise InvalidData(f"nodes[{i}] must be an object, not {kind(node)}", f"/nodes/{i}")
        label = node.get("id", node.get("name"))
        if isinstance(label, bool) or not isinstance(label, (int, str)):
            raise InvalidData(f"nodes[{i}] needs an id that is an integer or a string", f"/nodes/{i}")
        if label in digraph:
            raise InvalidData(f"nodes[{i}]: there is another node {label!r}", f"/nodes/{i}")
        digraph.add_node(label, **{str(key): value for key, value in node.items() if key != "id"})
    key = "links" if "links" in data else "edges"
    for i, link in enumerate(array(data.get(key), key, f"/{key}")):
        if not isinstance(link, Mapping):
            raise InvalidData(f"{key}[{i}] must be an object, not {kind(link)}", f"/{key}/{i}")
        for end in ("source", "target"):
            label = link.get(end)
            if isinstance(label, bool) or not isinstance(label, (int, str)) or label not in digraph:
                raise InvalidData(f"{key}[{i}]: there is no node {label!r} for its {end}", f"/{key}/{i}/{end}")
        if link["target"] in digraph.succ[link["source"]]:
            ends = f"{link['source']!r} to {link['target']!r}"
            raise InvalidData(f"{key}[{i}]: there is another link from {ends}", f"/{key}/{i}")
        digraph.add_edge(link["source"], link["target"])
    return from_networkx(digraph, order=order)


def to_node_link(graph: Graph) -> dict[str, Any]:
    """The node-link object of a graph, which `from_node_link` and `networkx.node_link_graph(edges="links")` read.

    Raises:
        InvalidData: as `to_networkx`.
    """
    digraph = to_networkx(graph)
    return {
        "directed": True,
        "multigraph": False,
        "graph": dict(digraph.graph),
        "nodes": [{"id": node, **data} for node, data in digraph.nodes(data=True)],
        "links": [{"source": source, "target": target} for source, target in digraph.edges],
    }


def _order(digraph: DiGraph, given: object) -> list[Any]:
    if not len(digraph):
        raise InvalidData("the graph has no nodes", "/nodes")
    try:
        if given is None:
            place = {node: i for i, node in enumerate(digraph)}
            return list(nx.lexicographical_topological_sort(digraph, key=place.__getitem__))
    except nx.NetworkXUnfeasible:
        around = " → ".join(repr(source) for source, _ in nx.find_cycle(digraph))
        raise InvalidData(f"the graph has a cycle: {around}", "/links") from None
    if not isinstance(given, (list, tuple)):
        raise InvalidData(f"the graph's order must be an array, not {kind(given)}", "/graph/order")
    place = {}
    for i, node in enumerate(given):
        if not isinstance(node, Hashable) or node not in digraph:
            raise InvalidData(f"order[{i}]: there is no node {node!r}", f"/graph/order/{i}")
        if node in place:
            raise InvalidData(f"order[{i}]: node {node!r} is there twice", f"/graph/order/{i}")
        place[node] = i
    for node in digraph:
        if node not in place:
            raise InvalidData(f"the order lacks node {node!r}", "/graph/order")
    for source, target in digraph.edges:
        if place[source] >= place[target]:
            raise InvalidData(f"the order puts {target!r} before {source!r}, which it reads", "/graph/order")
    return list(given)


def _attribute(digraph: DiGraph, nodes: list[Any], names: tuple[str, ...]) -> str:
    first = digraph.nodes[nodes[0]]
    for name in names:
        if name in first:
            return name
    raise InvalidData(f"node {nodes[0]!r} has none of the attributes {', '.join(names)}", "/nodes")


def _number(digraph: DiGraph, node: Any, name: str, default: int | None = None) -> int:
    found = digraph.nodes[node].get(name, default)
    if found is None:
        raise InvalidData(f"node {node!r} has no {name}", "/nodes")
    return _whole(found, f"node {node!r}: {name}")


def _whole(found: object, what: str) -> int:
    """A whole number, also where the file writes it as 3.0; numpy's integers are integers."""
    try:
        number = int(found) if isinstance(found, float) and found.is_integer() else found.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        advice = ": multiply them all by one factor first" if isinstance(found, float) else ""
        raise InvalidData(f"{what} must be a whole number, not {kind(found)}{advice}", "/nodes") from None
    if isinstance(found, bool) or not 0 <= number <= LARGEST_INTEGER:
        raise InvalidData(f"{what} must be a whole number from 0 to 2^53, not {found!r}", "/nodes")
    return int(number)


def _flag(digraph: DiGraph, node: Any, name: str) -> bool:
    found = digraph.nodes[node].get(name)
    if found is not None and not isinstance(found, bool):
        raise InvalidData(f"node {node!r}: {name} must be true or false, not {kind(found)}", "/nodes")
    return bool(found)


def _backward(digraph: DiGraph, nodes: list[Any]) -> int | None:
    """The first node marked `backward`, after which all must be; None where none is."""
    first = next((i for i, node in enumerate(nodes) if _flag(digraph, node, "backward")), None)
    if first is not None:
        for node in nodes[first:]:
            if not _flag(digraph, node, "backward"):
                raise InvalidData(f"node {node!r} is not marked backward, but {nodes[first]!r} before it is", "/nodes")
    return first
