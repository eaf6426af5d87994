"""Regions of a graph of Dynamo's that `nested_compile_region` made: written out where they are called."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .. import _compat


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo's with the nodes of each such region in the place of its call; itself where it has none.

    A region is compiled once for all its calls; a plan decides for each of them.
    """
    if not any(map(_compat.is_region, module.graph.nodes)):
        return module
    graph = _compat.empty_like(module.graph)
    results = _copy(module, graph, {}, "")
    graph.output(results)
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    _compat.copy_sources(module, made)
    return made


def _copy(module: fx.GraphModule, graph: fx.Graph, made: dict[fx.Node, Any], path: str) -> Any:
    """Copy a graph's nodes, those of its regions included, and return what stands for its output.

    Args:
        made: what stands for its inputs; the graph's own become inputs.
        path: of the module, before the names of its attributes.
    """
    for node in module.graph.nodes:
        if node in made:
            continue
        if node.op == "output":
            return fx.map_arg(node.args[0], made.__getitem__)
        if _compat.is_region(node):
            called, _, *operands = node.args
            inside = getattr(module, str(called.target))
            inputs = inside.graph.find_nodes(op="placeholder")
            given = fx.map_arg(operands, made.__getitem__)
            made[node] = _copy(inside, graph, dict(zip(inputs, given, strict=True)), f"{path}{called.target}.")
        elif node.target is operator.getitem and isinstance(made[node.args[0]], (tuple, list)):
            made[node] = made[node.args[0]][node.args[1]]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
            if node.op == "get_attr":
                made[node].target = path + str(node.target)
    raise AssertionError("a graph has an output")
