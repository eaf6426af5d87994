"""Graphs of Dynamo's before they are planned: regions written out, numbers known or left out, and parts cut out."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from .. import _compat
from ..capture.dataflow import ancestors, reached, results_of, tensors

log = logging.getLogger("remat")


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo's with the nodes of each `nested_compile_region` in place of its call; itself without one.

    A region is compiled once for all its calls; a plan decides for each of them.
    """
    if not any(map(_compat.is_region, module.graph.nodes)):
        return module
    graph = fx.Graph()
    graph.output(_write_out(module, graph, {}, ""))
    return _compat.with_graph(module, graph)


def _write_out(module: fx.GraphModule, graph: fx.Graph, made: dict[fx.Node, Any], path: str) -> Any:
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
            made[node] = _write_out(inside, graph, dict(zip(inputs, given, strict=True)), f"{path}{called.target}.")
        elif node.target is operator.getitem and isinstance(made[node.args[0]], (tuple, list)):
            made[node] = made[node.args[0]][node.args[1]]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
            if node.op == "get_attr":
                made[node].target = path + str(node.target)
    raise AssertionError("a graph has an output")


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
                following = {node for node in reached([given], lambda node: node.users) if node.op != "output"}
                if all(_of_numbers(node) for node in following):
                    apart[i] = following
        self.inputs = frozenset(apart)
        self.rest = module
        self._positions: list[int] = []
        if apart:
            self._split(module, set().union(*apart.values()))

    def _split(self, module: fx.GraphModule, following: set[fx.Node]) -> None:
        results = results_of(module.graph)
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


def _of_numbers(node: fx.Node) -> bool:
    """Whether a node is a number that is computed from numbers."""
    numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return all(isinstance(_compat.example_of(each), numbers) for each in (node, *node.all_input_nodes))


def _copied(module: fx.GraphModule, results: Sequence[Any], without: set[fx.Node] | None = None) -> fx.GraphModule:
    """A graph with the same inputs and other results, from all that is not left out, or else from what they need."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = [result for result in results if isinstance(result, fx.Node)]
    kept = ancestors(needed) if without is None else set(module.graph.nodes) - without
    for node in module.graph.nodes:
        if node.op == "placeholder" or (node.op != "output" and node in kept):
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[each] if isinstance(each, fx.Node) else each for each in results))
    return fx.GraphModule(module, graph)


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


_SPARSE_AT = {F.embedding: 6, F.embedding_bag: 7, torch.embedding: 4}
"""Where an operator takes whether its gradient is sparse."""


class _Part(nn.Module):
    """A part that runs by plans."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def divided(module: fx.GraphModule, make: Callable[[fx.GraphModule], Callable[..., Any]]) -> fx.GraphModule | None:
    """A graph whose parts run one after the other: those that no plan can hold as they are, the others by plans.

    None: it has no such part; or nothing else; or a mode of torch's is set somewhere in it, which a cut might leave on.

    Args:
        make: what runs a part by plans.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    apart = [_is_apart(node) for node in nodes]
    sets_modes = any(node.op == "call_function" and _compat.example_of(node) is None for node in nodes)
    if sets_modes or len(set(apart)) < 2:
        return None
    part, count = dict[fx.Node, int](), 0
    for i, node in enumerate(nodes):
        count += i > 0 and apart[i] != apart[i - 1]
        part[node] = count
    found = split_module(module, module, part.__getitem__, keep_original_order=True)
    plain = {f"submod_{part[node]}" for node, is_apart in zip(nodes, apart, strict=True) if is_apart}
    examples = {node.name: _compat.example_of(node) for node in module.graph.nodes}
    for call in found.graph.find_nodes(op="call_module"):
        if call.target not in plain:
            inside = getattr(found, str(call.target))
            _compat.set_examples(inside, examples)
            setattr(found, str(call.target), _Part(make(inside)))
    log.info("what no plan can hold runs as it is, between %d parts that are planned", count + 1 - len(plain))
    return found


def _is_apart(node: fx.Node) -> bool:
    at = _SPARSE_AT.get(node.target)  # type: ignore[arg-type]
    if at is not None and (node.kwargs.get("sparse") or (len(node.args) > at and node.args[at])):
        return True
    seen: Sequence[fx.Node] = (node, *node.all_input_nodes)
    return any(t.layout is not torch.strided for each in seen for t in tensors(_compat.example_of(each)))
