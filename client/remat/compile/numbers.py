"""Numbers of Python's in a graph of Dynamo's: those that a plan is made for, and those that it need not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import _compat


class Counted:
    """What a graph returns that follows from its numbers alone, such as a counter after the call.

    Attributes:
        inputs: the positions of the numbers that nothing else follows from: no plan depends on them.
        rest: the graph without such results, which stand as None in it.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        apart: dict[int, set[fx.Node]] = {}
        for i, given in enumerate(placeholders):
            if isinstance(_compat.example_of(given), torch.SymInt | torch.SymFloat):
                following = _following(given)
                if all(_of_numbers(node) for node in following):
                    apart[i] = following
        self.inputs = frozenset(apart)
        self.rest = module
        self._positions: list[int] = []
        if apart:
            self._split(module, set().union(*apart.values()))

    def _split(self, module: fx.GraphModule, following: set[fx.Node]) -> None:
        results = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
        self._positions = [i for i, result in enumerate(results) if result in following]
        left = [None if i in self._positions else result for i, result in enumerate(results)]
        self.rest = _copied(module, left, without=following)
        self._counted = _copied(module, [results[i] for i in self._positions])

    def results(self, inputs: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
        """All that the graph returns, from its inputs and from what the rest of it returns."""
        if not self._positions:
            return others
        found = list(others)
        for position, number in zip(self._positions, self._counted(*inputs), strict=True):
            found[position] = number
        return found


def _following(start: fx.Node) -> set[fx.Node]:
    """A node and all that is computed from it."""
    seen, stack = set[fx.Node](), [start]
    while stack:
        node = stack.pop()
        if node not in seen and node.op != "output":
            seen.add(node)
            stack += node.users
    return seen


def _of_numbers(node: fx.Node) -> bool:
    """Whether a node is a number that is computed from numbers."""
    numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return all(isinstance(_compat.example_of(each), numbers) for each in (node, *node.all_input_nodes))


def _copied(module: fx.GraphModule, results: Sequence[Any], without: set[fx.Node] | None = None) -> fx.GraphModule:
    """A graph with the same inputs and other results, from all that is not left out, or else from what they need."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    kept = _needed(results) if without is None else set(module.graph.nodes) - without
    for node in module.graph.nodes:
        if node.op == "placeholder" or (node.op != "output" and node in kept):
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[each] if isinstance(each, fx.Node) else each for each in results))
    return fx.GraphModule(module, graph)


def _needed(results: Sequence[Any]) -> set[fx.Node]:
    seen, stack = set[fx.Node](), [result for result in results if isinstance(result, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return seen


def read_as_numbers(module: fx.GraphModule) -> tuple[int, ...]:
    """Which inputs stand for numbers of Python's, as tensors of one element, that the graph reads as numbers."""
    inputs = module.graph.find_nodes(op="placeholder")
    return tuple(i for i, given in enumerate(inputs) if any(map(_reads_number, given.users)))


def _reads_number(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def with_constants(module: fx.GraphModule, numbers: Mapping[int, float]) -> fx.GraphModule:
    """A graph of Dynamo's with numbers in the place of what reads them from the inputs at these positions."""
    inputs = module.graph.find_nodes(op="placeholder")
    known = {inputs[i]: number for i, number in numbers.items()}
    graph, made = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        if _reads_number(node) and node.args[0] in known:
            made[node] = known[node.args[0]]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule(module, graph)
