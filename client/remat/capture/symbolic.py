"""Graphs with symbols for sizes: the numbers of a call in their place, and both passes traced once for all sizes.

A new size then costs a copy of the joint graph, in which dataflow and costs are those of any other step. What is
lowered is the graph of symbols: a plan runs at every size at which it is a plan, and is compiled once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import sympy
import torch
from torch import fx

from remat_ir import Plan

from .. import _compat
from .dataflow import drop_unread_statistics
from .joint import compiled_joint
from .operations import Operations
from .refused import first_line
from .sizes import SYMBOLS, sized_by_inputs

T = TypeVar("T")

log = logging.getLogger("remat")


class _Numbers:
    """Numbers for symbols.

    Args:
        storages: by storages of tensors of symbolic sizes, those in which the ones of known sizes lie.
    """

    def __init__(self, values: Mapping[Any, Any], storages: dict[int, Any]) -> None:
        self._values, self._storages, self._known = values, storages, dict[Any, Any]()
        self._mode = _compat.FakeTensorMode()

    def of(self, symbol: Any) -> Any:
        """The number that a symbol, or an expression of symbols, stands for."""
        if not isinstance(symbol, SYMBOLS):
            return symbol
        expression = symbol.node.expr
        if expression not in self._known:
            self._known[expression] = expression.xreplace(self._values)
        kind = int if isinstance(symbol, torch.SymInt) else float if isinstance(symbol, torch.SymFloat) else bool
        return kind(self._known[expression])

    def inside(self, example: Any) -> Any:
        """A value with numbers for its symbols; its tensors share storages as they did."""
        if isinstance(example, (tuple, list)):
            return type(example)(map(self.inside, example))
        return self._tensor(example) if isinstance(example, torch.Tensor) else self.of(example)

    def _tensor(self, example: torch.Tensor) -> torch.Tensor:
        key = _compat.storage_key(example)
        if key not in self._storages:
            self._storages[key] = _compat.meta_storage(self.of(example.untyped_storage().nbytes()))
        shape, strides = (tuple(map(self.of, sizes)) for sizes in (example.shape, example.stride()))
        offset = self.of(example.storage_offset())
        made = _compat.fake_in(self._mode, self._storages[key], example, shape, strides, offset)
        return made.requires_grad_(example.requires_grad and example.is_leaf)


def _with_numbers(joint: fx.GraphModule, numbers: _Numbers) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of a joint graph with numbers for symbols, and of its nodes those that they are copies of."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def argument(node: fx.Node) -> Any:
        value = node.meta.get("val")
        return numbers.of(value) if isinstance(value, SYMBOLS) else made[node]

    with _compat.only_real_tensors():
        for node in joint.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, SYMBOLS) and node.op != "placeholder":
                continue
            args, kwargs = fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
            made[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
            made[node].meta = dict(node.meta)
            if value is not None:
                made[node].meta["val"] = numbers.inside(value)
    return fx.GraphModule(joint, graph), {copy: node for node, copy in made.items()}


@dataclass(frozen=True, eq=False)
class JointTrace:
    """Both passes of a graph of Dynamo's as one graph, at the sizes of a call.

    Attributes:
        joint: that graph.
        descriptor: what AOTAutograd needs to make a function of the two graphs that it is lowered to.
        symbolic: what it is a copy of, with numbers for symbols; None: it was traced at these sizes.
        like: of its nodes, those of the graph of symbols.
    """

    joint: fx.GraphModule
    descriptor: Any
    symbolic: Symbolic | None = None
    like: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def forward_outputs(self) -> int:
        """How many of its outputs the forward pass returns."""
        return _compat.forward_outputs(self.descriptor)

    def carried_out(self, step: Operations, plan: Plan, make: Callable[[], T]) -> T:
        """What `make` makes of a plan for operations of this graph; of equal ones at other sizes it is the same."""
        if self.symbolic is None:
            return make()
        key = plan, tuple((op.kind, op.nodes, op.reads, op.makes, op.consumes) for op in step.ops), step.early
        found = self.symbolic.made.get(key)
        if found is None:
            found = self.symbolic.made[key] = make()
        return found


class Symbolic:
    """Both passes of a graph of Dynamo's, traced with its symbols.

    Args:
        inputs: of a call that `takes` lets through; its numbers decide what guards do not.

    Attributes:
        graph: the joint graph, whose sizes are computed from its own numbers alone.
        made: what has been compiled of it and is in use, by plan and operations.

    Raises:
        CaptureError: torch cannot trace it.
        ValueError: an input that gets a gradient is written.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._module = module
        symbols, placeholders = _compat.Symbols(_read(module, inputs)), module.graph.find_nodes(op="placeholder")
        self._symbols = symbols
        self._given = [
            symbols.like(given, _compat.example_of(p)) for p, given in zip(placeholders, inputs, strict=True)
        ]
        self.descriptor = compiled_joint(module, self._given, symbols.mode)
        self.graph = _compat.joint_graph(self.descriptor)
        self.made: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        written = [_compat.input_place(node) for node in _compat.updated_inputs(self.graph.graph).values()]
        if any(at is not None and inputs[at].requires_grad for at in written):
            raise ValueError("an input that gets a gradient is written")
        self._writes = bool(written)
        drop_unread_statistics(self.graph)

    @staticmethod
    def takes(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether a graph has symbols, and can be traced at the numbers of a call: 0 and 1 are sizes of their own."""
        numbers = _read(module, inputs).values()
        return bool(numbers) and all(isinstance(number, sympy.Integer) and number > 1 for number in numbers)

    def at(self, inputs: Sequence[Any]) -> JointTrace | None:
        """The joint graph at the sizes of a call; None where the trace does not hold for them."""
        values = self._symbols.values(_read(self._module, inputs))
        pairs = [each for each in zip(self._given, inputs, strict=True) if isinstance(each[1], torch.Tensor)]
        own = {_compat.storage_key(given): given.untyped_storage().nbytes() for _, given in pairs}
        if values is None or (self._writes and len(own) < len(pairs)):
            return None
        held = {key: _compat.meta_storage(size) for key, size in own.items()}
        storages = {_compat.storage_key(fake): held[_compat.storage_key(given)] for fake, given in pairs}
        joint, like = _with_numbers(self.graph, _Numbers(values, storages))
        return JointTrace(joint, self.descriptor, self, like)


def _read(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[Any, Any]:
    """What the symbols of a graph of Dynamo's are in a call, without numbers that nothing reads."""
    found: dict[Any, Any] = {}
    for placeholder, given in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if not placeholder.users and not isinstance(given, torch.Tensor):
            continue
        example = _compat.example_of(placeholder)
        pairs = [(example, given)]
        if isinstance(example, torch.Tensor) and isinstance(given, torch.Tensor):
            pairs = list(zip((*example.shape, *example.stride()), (*given.shape, *given.stride()), strict=True))
        for symbol, number in pairs:
            if isinstance(symbol, SYMBOLS) and symbol.node.expr.is_Symbol:
                found[symbol.node.expr] = sympy.sympify(number)
    return found


class JointTraces:
    """The joint graphs of a graph of Dynamo's: traced once with its symbols, or at the sizes of a call.

    It is traced at these where it has no symbols, or they cannot be traced, and where the trace with symbols does not
    hold: of sizes 0 and 1, of such at which a guard of it fails, and where inputs that it writes share memory.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module, self._may = module, True
        self._symbolic: Symbolic | None = None
        try:
            self._module = sized_by_inputs(module)
        except Exception as error:  # noqa: BLE001 – a trace by numbers needs no symbols, and says what is wrong
            self._give_up(error)

    def at(self, inputs: Sequence[Any]) -> JointTrace:
        """The joint graph at the sizes of a call.

        Raises:
            CaptureError: torch cannot trace it; the message says why and what to do.
        """
        found = self._with_symbols(inputs) if self._may else None
        if found is not None:
            return found
        descriptor = compiled_joint(self._module, inputs)
        return JointTrace(_compat.joint_graph(descriptor), descriptor)

    def _with_symbols(self, inputs: Sequence[Any]) -> JointTrace | None:
        try:
            if self._symbolic is None and Symbolic.takes(self._module, inputs):
                self._symbolic = Symbolic(self._module, inputs)
                log.info("sizes are symbols of its trace: a further one costs no trace")
            return None if self._symbolic is None else self._symbolic.at(inputs)
        except Exception as error:  # noqa: BLE001 – a trace by numbers needs no symbols, and says what is wrong
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        """Of an error of torch's, whatever it is: a trace by numbers needs no symbols."""
        log.info("each size is traced by itself, which takes longer and changes no plan: %s", first_line(error))
        self._may, self._symbolic = False, None
