"""Sizes that are computed from the numbers that a graph is given, and not read from tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from .. import _compat

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def sized_by_inputs(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo's with its sizes computed at its beginning, from its inputs; itself where it has no symbols.

    Blocks are alike only then: otherwise each has nodes of its own for its sizes.

    Raises:
        KeyError: a size does not follow from the numbers that are given.
    """
    if not any(isinstance(_compat.example_of(node), SYMBOLS) for node in module.graph.nodes):
        return module
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    compute_sizes(graph, _compat.EXAMPLE)
    for node in reversed(graph.nodes):
        if not node.users and isinstance(_compat.example_of(node), torch.Size):
            graph.erase_node(node)
    return _compat.with_graph(module, graph)


def compute_sizes(graph: fx.Graph, note: str) -> None:
    """Let whole numbers be computed at the beginning of a graph from those that it is given.

    A tensor that a size is read from would be kept for that. Other numbers follow as they were written, bit for bit.

    Args:
        note: of the nodes that says their fake values.

    Raises:
        KeyError: one does not follow from these.
    """
    placeholders = graph.find_nodes(op="placeholder")
    known, made = dict[Any, fx.Node](), dict[Any, fx.Node]()
    for node in placeholders:
        value = node.meta.get(note)
        if isinstance(value, SYMBOLS):
            known.setdefault(value.node.expr, node)
    for node in list(graph.nodes):
        value = node.meta.get(note)
        if node.op == "placeholder" or not isinstance(value, SYMBOLS):
            continue
        expression = value.node.expr
        of_numbers = all(isinstance(read.meta.get(note), SYMBOLS) for read in node.all_input_nodes)
        if of_numbers and not all(getattr(part, "is_integer", False) for part in sympy.preorder_traversal(expression)):
            continue
        if expression not in made:
            with graph.inserting_before(placeholders[-1].next):
                made[expression] = _computed(graph, expression, known, {note: value})
        node.replace_all_uses_with(made[expression])
        graph.erase_node(node)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
"""What computes an expression of sympy's or torch's, by the name of its class."""


def _computed(graph: fx.Graph, expression: Any, known: Mapping[Any, fx.Node], notes: Mapping[str, Any]) -> fx.Node:
    """The node that gives an expression of symbols, added with those that it needs.

    Raises:
        KeyError: it has a symbol that no node gives, or another operator.
    """

    def of(part: Any) -> Any:
        if part.is_Integer:
            return int(part)
        if part.is_Float:
            return float(part)
        if part.is_Symbol:
            return known[part]
        function = _OPERATORS[type(part).__name__]
        return functools.reduce(lambda one, other: call(function, one, other), map(of, part.args))

    def call(function: Callable[..., Any], *args: Any) -> fx.Node:
        made = graph.call_function(function, args)
        made.meta.update(notes)
        return made

    found = of(expression)
    return found if isinstance(found, fx.Node) else call(type(found), found)
