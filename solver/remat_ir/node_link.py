"""Graphs that others made: node-link JSON, in which networkx writes digraphs and in which public instances travel."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from .document import AnyObject, Document, Flag, Member, Unread
from .errors import InvalidData
from .graph import MOST_INPUTS, MOST_OPS, Graph, graph_of
from .read import LARGEST_INTEGER, kind

COSTS = ("cost", "cost_cpu", "duration")
"""What a node's cost is called: here, in Checkmate's graphs, in Moccasin's."""
SIZES = ("size", "cost_ram", "out_cost")
"""What the size of a node's output is called, in the same order."""

_LINKS = Unread(AnyObject(), cap=MOST_INPUTS)
ENDS = (("source", "target"), ("0", "1"))
"""What the ends of a link are called: by networkx, and in Moccasin's random graphs."""
NODE_LINK = Document(
    "NodeLinkDocument",
    "node-link data",
    "A graph as networkx writes it, without `format`: each node is an op that makes one value.",
    {
        "directed": Member(Flag(), True),
        "multigraph": Member(Flag(), False),
        "graph": Member(AnyObject(), {}, "`order` and `fixed`, where they are there."),
        "nodes": Member(
            Unread(AnyObject(), 1, cap=MOST_OPS),
            about="`id`, a cost (`cost`, `cost_cpu` or `duration`), a size (`size`, `cost_ram` or `out_cost`); maybe "
            "`workspace`, `keep`, `consumed`, `once`, `backward`.",
        ),
        "links": Member(_LINKS, (), "`source` and `target`, or `0` and `1`."),
        "edges": Member(_LINKS, (), "Another name of `links`."),
    },
    open=True,
)

Nodes = Mapping[Any, Mapping[str, Any]]
"""The attributes of each node, in the nodes' own order."""
Sources = Mapping[Any, Sequence[Any]]
"""The nodes that each node reads."""


def is_node_link(data: object) -> bool:
    """Whether a JSON value is meant as node-link data: an object with `nodes` and without a `format`."""
    return isinstance(data, Mapping) and "nodes" in data and "format" not in data


def from_node_link(data: object, *, order: Sequence[Hashable] | None = None) -> Graph:
    """Read node-link JSON, or its text: `nodes` with ids and numbers, `links` (or `edges`) with source and target.

    A node is called by its `id`, or by its `name` where it has none. Attributes: see `graph_of_nodes`.

    Raises:
        InvalidData: malformed in any way; the message and the pointer name the place.

    >>> nodes = [{"id": "a", "cost": 3, "size": 8}, {"id": "b", "cost": 5, "size": 2}]
    >>> from_node_link({"nodes": nodes, "links": [{"source": "a", "target": "b"}]}).op_inputs
    ((), (0,))
    """
    found = NODE_LINK.read(data)
    if not found.get("directed", True) or found.get("multigraph", False):
        raise InvalidData("node-link data must be of a directed graph without parallel edges", "/directed")
    nodes: dict[Any, Mapping[str, Any]] = {}
    for i, node in enumerate(found["nodes"]):
        if not isinstance(node, Mapping):
            raise InvalidData(f"nodes[{i}] must be an object, not {kind(node)}", f"/nodes/{i}")
        label = node.get("id", node.get("name"))
        if isinstance(label, bool) or not isinstance(label, (int, str)):
            raise InvalidData(f"nodes[{i}] needs an id that is an integer or a string", f"/nodes/{i}")
        if label in nodes:
            raise InvalidData(f"nodes[{i}]: there is another node {label!r}", f"/nodes/{i}")
        nodes[label] = node
    return graph_of_nodes(nodes, _sources(found, nodes), found.get("graph", {}), order=order)


def _sources(found: Mapping[str, Any], nodes: Nodes) -> Sources:
    sources: dict[Any, dict[Any, None]] = {label: {} for label in nodes}
    key = "links" if "links" in found else "edges"
    for i, link in enumerate(found.get(key, ())):
        if not isinstance(link, Mapping):
            raise InvalidData(f"{key}[{i}] must be an object, not {kind(link)}", f"/{key}/{i}")
        # other attributes of a link may have any names: only a link without its usual ends has the others
        ends = ENDS[0] if any(end in link for end in ENDS[0]) or not any(end in link for end in ENDS[1]) else ENDS[1]
        for end, role in zip(ends, ENDS[0], strict=True):
            label = link.get(end)
            if isinstance(label, bool) or not isinstance(label, (int, str)) or label not in nodes:
                raise InvalidData(f"{key}[{i}]: there is no node {label!r} for its {role}", f"/{key}/{i}/{end}")
        source, target = (link[end] for end in ends)
        if source in sources[target]:
            raise InvalidData(f"{key}[{i}]: there is another link from {source!r} to {target!r}", f"/{key}/{i}")
        sources[target][source] = None
    return {label: tuple(found) for label, found in sources.items()}


def graph_of_nodes(
    nodes: Nodes,
    sources: Sources,
    about: Mapping[str, Any],
    *,
    order: Sequence[Hashable] | None = None,
    cost: str | None = None,
    size: str | None = None,
) -> Graph:
    """A graph in the papers' model: each node is an op that makes one value, each edge a read of it.

    Args:
        nodes: a cost and a size each, and maybe `workspace`, `keep`, `consumed`, `once`, `backward` (all backward
            nodes come after all others) and `name`.
        sources: the nodes that each node reads.
        about: the attributes of the graph: `order` and `fixed` may be there.
        order: the nodes in the order in which they run; else the graph's `order`; else the nodes' own order if it is
            topological; else the topological order that stays closest to it.
        cost, size: the attributes to read; else the first that is there of `COSTS` and `SIZES`.

    Raises:
        InvalidData: a cycle, a missing attribute, a number that is no whole non-negative number, an order that is
            none; the message names the node.
    """
    if not nodes:
        raise InvalidData("the graph has no nodes", "/nodes")
    given = about.get("order") if order is None else order
    labels = _topological(nodes, sources) if given is None else _checked_order(nodes, sources, given)
    cost, size = cost or _attribute(nodes, labels[0], COSTS), size or _attribute(nodes, labels[0], SIZES)
    position = {label: i for i, label in enumerate(labels)}
    return graph_of(
        [_number(nodes, label, cost) for label in labels],
        [_number(nodes, label, size) for label in labels],
        [sorted(position[source] for source in sources[label]) for label in labels],
        op_workspace_bytes=tuple(_number(nodes, label, "workspace", 0) for label in labels),
        keep=tuple(i for i, label in enumerate(labels) if _flag(nodes, label, "keep")),
        consumes=tuple(i for i, label in enumerate(labels) if _flag(nodes, label, "consumed")),
        once=tuple(i for i, label in enumerate(labels) if _flag(nodes, label, "once")),
        backward_from=_backward(nodes, labels),
        fixed_bytes=_whole(about.get("fixed", 0), "the graph's fixed"),
        op_names=tuple(str(nodes[label].get("name", label)) for label in labels),
    )


def to_node_link(graph: Graph) -> dict[str, Any]:
    """The node-link object of a graph, which `from_node_link` and `networkx.node_link_graph(edges="links")` read.

    Nodes are op indices with `cost`, `size`, and `name`, `workspace`, `keep`, `consumed`, `once`, `backward` where
    there is something to say.

    Raises:
        InvalidData: an op makes no value or several, or an optional one: node-link data can't say that.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([3, 5], [8, 2], [[], [0]])
    >>> from_node_link(to_node_link(graph)) == graph
    True
    """
    for op, values in enumerate(graph.op_values):
        if len(values) != 1:
            raise InvalidData(
                f"{graph.op_label(op)} makes {len(values)} values; in a digraph each node has exactly one"
            )
    if graph.optional:
        op = graph.value_op[graph.optional[0]]
        raise InvalidData(f"{graph.op_label(op)} makes an optional value; a digraph has none")
    keep, consumed = ({graph.value_op[value] for value in values} for values in (graph.keep, graph.consumes))
    flags = (("keep", keep), ("consumed", consumed), ("once", set(graph.once)))
    nodes: list[dict[str, Any]] = []
    for op in range(graph.ops):
        data: dict[str, Any] = {"id": op, "cost": graph.op_cost_ns[op], "size": graph.value_bytes[op]}
        if graph.op_names is not None:
            data["name"] = graph.op_names[op]
        if graph.op_workspace_bytes[op]:
            data["workspace"] = graph.op_workspace_bytes[op]
        data |= {key: True for key, those in flags if op in those}
        if graph.backward_from is not None:
            data["backward"] = op >= graph.backward_from
        nodes.append(data)
    return {
        "directed": True,
        "multigraph": False,
        "graph": {"order": list(range(graph.ops)), "fixed": graph.fixed_bytes},
        "nodes": nodes,
        "links": [{"source": value, "target": op} for op, inputs in enumerate(graph.op_inputs) for value in inputs],
    }


def _topological(nodes: Nodes, sources: Sources) -> list[Any]:
    """Of the nodes that are ready, the first in their own order comes next."""
    labels = list(nodes)
    place = {label: i for i, label in enumerate(labels)}
    sorter = TopologicalSorter({i: [place[source] for source in sources[label]] for label, i in place.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        around = error.args[1][:-1]  # its nodes in the direction of its edges
        first = around.index(min(around))
        said = " → ".join(repr(labels[i]) for i in around[first:] + around[:first])
        raise InvalidData(f"the graph has a cycle: {said}", "/links") from None
    found: list[Any] = []
    ready = list(sorter.get_ready())
    heapq.heapify(ready)
    while ready:
        i = heapq.heappop(ready)
        found.append(labels[i])
        sorter.done(i)
        for reader in sorter.get_ready():
            heapq.heappush(ready, reader)
    return found


def _checked_order(nodes: Nodes, sources: Sources, given: object) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        raise InvalidData(f"the graph's order must be an array, not {kind(given)}", "/graph/order")
    place: dict[Any, int] = {}
    for i, label in enumerate(given):
        if not isinstance(label, Hashable) or label not in nodes:
            raise InvalidData(f"order[{i}]: there is no node {label!r}", f"/graph/order/{i}")
        if label in place:
            raise InvalidData(f"order[{i}]: node {label!r} is there twice", f"/graph/order/{i}")
        place[label] = i
    for label in nodes:
        if label not in place:
            raise InvalidData(f"the order lacks node {label!r}", "/graph/order")
    for label in nodes:
        for source in sources[label]:
            if place[source] >= place[label]:
                raise InvalidData(f"the order puts {label!r} before {source!r}, which it reads", "/graph/order")
    return list(given)


def _attribute(nodes: Nodes, first: Any, names: tuple[str, ...]) -> str:
    for name in names:
        if name in nodes[first]:
            return name
    raise InvalidData(f"node {first!r} has none of the attributes {', '.join(names)}", "/nodes")


def _number(nodes: Nodes, label: Any, name: str, default: int | None = None) -> int:
    found = nodes[label].get(name, default)
    if found is None:
        raise InvalidData(f"node {label!r} has no {name}", "/nodes")
    return _whole(found, f"node {label!r}: {name}")


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


def _flag(nodes: Nodes, label: Any, name: str) -> bool:
    found = nodes[label].get(name)
    if found is not None and not isinstance(found, bool):
        raise InvalidData(f"node {label!r}: {name} must be true or false, not {kind(found)}", "/nodes")
    return bool(found)


def _backward(nodes: Nodes, labels: list[Any]) -> int | None:
    """The first node marked `backward`, after which all must be; None where none is."""
    first = next((i for i, label in enumerate(labels) if _flag(nodes, label, "backward")), None)
    if first is not None:
        for label in labels[first:]:
            if not _flag(nodes, label, "backward"):
                raise InvalidData(
                    f"node {label!r} is not marked backward, but {labels[first]!r} before it is", "/nodes"
                )
    return first
