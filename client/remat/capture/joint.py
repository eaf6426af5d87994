"""The joint graph of a graph of Dynamo's, traced outside of Dynamo: of blocks that repeat a few are, at given sizes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .. import _compat
from ..errors import CaptureError
from .dataflow import tensors
from .expand import expand
from .refused import advice, first_line, place
from .repeats import KEPT, Run, runs, shortened

log = logging.getLogger("remat")


def compiled_joint(stack: contextlib.ExitStack, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """The descriptor of both passes of a graph that Dynamo gives to its backend, at the sizes of a call.

    Args:
        stack: holds the contexts of the trace.
        inputs: of the call, in the order of the graph's placeholders.

    Raises:
        CaptureError: torch cannot trace it; the message says why and what to do.
    """
    try:
        whole = at_sizes(graph, inputs)
        found = runs(whole.graph)
        if found:
            return _short(stack, whole, found, inputs)
    except Exception as error:  # the trace of the whole says what is wrong with the graph itself
        log.info("all blocks are traced one by one, which takes longer and changes no plan: %s", first_line(error))
    try:
        return _exported(stack, graph, inputs)
    except Exception as error:
        raise CaptureError(
            f"torch cannot trace both passes of it: {advice(graph, error)}{first_line(error)}{place(str(error))}"
        ) from error


def _exported(stack: contextlib.ExitStack, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Traced as it is; what torch cannot trace so, once more with symbols for sizes that depend on data."""
    try:
        with contextlib.ExitStack() as own:
            descriptor = _compat.export_joint(own, graph, inputs, {}, symbols=False)
            stack.push(own.pop_all())
        return descriptor
    except (AttributeError, AssertionError) as error:
        log.info("traced again with symbols for sizes that depend on data: %s", first_line(error))
        return _compat.export_joint(stack, graph, inputs, {}, symbols=True)


def _short(stack: contextlib.ExitStack, whole: fx.GraphModule, found: Sequence[Run], inputs: Sequence[Any]) -> Any:
    """The same, of a few blocks alone, with the others added."""
    short = fx.GraphModule(whole, shortened(whole.graph, found))
    short.meta = dict(whole.meta)
    _compat.copy_sources(whole, short)
    places = {placeholder: at for at, placeholder in enumerate(whole.graph.find_nodes(op="placeholder"))}
    with contextlib.ExitStack() as own:
        descriptor = _compat.export_joint(own, short, inputs, {}, symbols=False)
        expand(_compat.joint_graph(descriptor), found, places)
        stack.push(own.pop_all())
    counts = ", ".join(f"{len(run.blocks)} blocks of {len(run.blocks[0])} ops" for run in found)
    log.info("the model repeats %s: %d of each kind were traced, the others are copies", counts, KEPT)
    return descriptor


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def at_sizes(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph of Dynamo's with the numbers of a call in the place of its symbols; itself where it has none.

    Blocks are alike only then: with symbols, each block's sizes are expressions of their own.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    values = _values(placeholders, inputs)
    written = any(_compat.version_counter(t) for p in placeholders for t in tensors(_compat.example_of(p)))
    if not values or written:
        return module
    numbers = _Numbers(values)
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def argument(node: fx.Node) -> Any:
        example = _compat.example_of(node)
        return numbers.of(example) if isinstance(example, _SYMBOLS) else made[node]

    for node in module.graph.nodes:
        example = _compat.example_of(node)
        if isinstance(example, _SYMBOLS) and node.op != "placeholder":
            continue
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], argument))
            continue
        args, kwargs = fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
        made[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        made[node].meta = {**node.meta, "example_value": numbers.inside(example)}
    found = fx.GraphModule(module, graph)
    found.meta = dict(module.meta)
    _compat.copy_sources(module, found)
    return found


def _values(placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> dict[Any, Any]:
    """What each symbol of a graph is in a call."""
    found: dict[Any, Any] = {}
    for placeholder, given in zip(placeholders, inputs, strict=True):
        example = _compat.example_of(placeholder)
        pairs = [(example, given)]
        if isinstance(example, torch.Tensor) and isinstance(given, torch.Tensor):
            pairs = list(zip((*example.shape, *example.stride()), (*given.shape, *given.stride()), strict=True))
        for symbol, number in pairs:
            if isinstance(symbol, _SYMBOLS) and symbol.node.expr.is_Symbol:
                found[symbol.node.expr] = sympy.sympify(number)
    return found


class _Numbers:
    """Numbers for symbols."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values, self._known = values, dict[Any, Any]()
        self._mode = _compat.FakeTensorMode()

    def of(self, symbol: Any) -> Any:
        """The number that a symbol, or an expression of symbols, stands for."""
        if not isinstance(symbol, _SYMBOLS):
            return symbol
        expression = symbol.node.expr
        if expression not in self._known:
            self._known[expression] = expression.xreplace(self._values)
        kind = int if isinstance(symbol, torch.SymInt) else float if isinstance(symbol, torch.SymFloat) else bool
        return kind(self._known[expression])

    def inside(self, example: Any) -> Any:
        """An example with numbers for its symbols; its tensors lie in memory of their own."""
        if isinstance(example, (tuple, list)):
            return type(example)(map(self.inside, example))
        return self._tensor(example) if isinstance(example, torch.Tensor) else self.of(example)

    def _tensor(self, example: torch.Tensor) -> torch.Tensor:
        shape, strides = (tuple(map(self.of, sizes)) for sizes in (example.shape, example.stride()))
        with self._mode:
            made = torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)
        return made.requires_grad_(True) if example.requires_grad and example.is_leaf else made
