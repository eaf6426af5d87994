"""A capture as bytes and back: what AOTAutograd made, and the guards of Dynamo, built again on what is there now.

Bytes are JSON: containers, and the objects of torch that hold metadata, by the names of their classes.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import enum
import functools
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.source as _source
import torch._functorch._aot_autograd.schemas as _schemas
import torch.backends.opt_einsum
from torch import fx
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder
from torch._dynamo.output_graph import OutputGraphGuardsState
from torch._guards import Guard, GuardsSet, Source
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from .memory import storage_key

__all__ = ["Unreadable", "pack", "readings", "traced_code", "unpack"]

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_PLAIN = (bool, int, str, type(None))
_LEFT = frozenset({"stack_trace", "tensor_meta"})
"""Of a node's notes, those that say nothing of what it does, and are long."""

_HOLDERS = frozenset(
    {"torch._dynamo.source", "torch._guards", "torch.utils._pytree"}
    | {f"torch._functorch._aot_autograd.{name}" for name in ("runtime_wrappers", "descriptors", "schemas")}
    | {"torch._functorch._aot_autograd.subclass_utils"}
)
"""The modules whose data classes a capture may have."""


class Unreadable(Exception):
    """A capture that cannot be written, or bytes that are none; the message says why."""


class _Node:
    """A node of the graph, in the arguments of another."""

    def __init__(self, index: int) -> None:
        self.index = index


_ALIAS = "__remat_module_"
"""Before the name of a module, where guards find it among the globals of the code that is called."""


class _Writer:
    """Things as JSON: tensors in a table, nodes, operators and classes by name, objects of metadata once each."""

    def __init__(self, nodes: Mapping[fx.Node, int], aliases: Mapping[str, str]) -> None:
        self._nodes, self._aliases = nodes, aliases
        self._storages: dict[int, int] = {}
        self._number: dict[int, int] = {}
        self._alive: list[Any] = []
        self.storages: list[Any] = []
        self.tensors: list[Any] = []
        self.objects: list[Any] = []

    def write(self, thing: Any) -> Any:
        """A thing as JSON.

        Raises:
            Unreadable: it has no such form.
        """
        kind = type(thing)
        if kind in _PLAIN:
            return thing
        if kind in _NESTED:
            return [_NESTED[kind], *map(self.write, thing)]
        if isinstance(thing, (dict, collections.OrderedDict)):
            return ["dict", kind.__name__, *([self.write(k), self.write(v)] for k, v in thing.items())]
        if kind in (float, complex):
            return [kind.__name__, repr(thing)]
        if kind is slice:
            return ["slice", *map(self.write, (thing.start, thing.stop, thing.step))]
        if isinstance(thing, fx.Node):
            return ["node", self._nodes[thing]]
        if isinstance(thing, FakeTensor):
            return ["tensor", self._tensor(thing)]
        if isinstance(thing, (torch.dtype, torch.layout, torch.memory_format)):
            return ["torch", str(thing).removeprefix("torch.")]
        if isinstance(thing, torch.device):
            return ["device", str(thing)]
        if isinstance(thing, torch._ops.OpOverload) or thing is operator.getitem:
            return ["operator", "getitem" if thing is operator.getitem else str(thing)]
        if isinstance(thing, type):
            return ["type", thing.__module__, thing.__qualname__]
        if isinstance(thing, enum.Enum):
            return ["enum", kind.__module__, kind.__qualname__, thing.name]
        if type(thing) is _source.GlobalSource and thing.global_name in self._aliases:
            return ["module", self._aliases[thing.global_name]]
        if dataclasses.is_dataclass(thing):
            return ["object", self._object(thing)]
        raise Unreadable(f"it has a {kind.__module__}.{kind.__qualname__}")

    def _object(self, thing: Any) -> int:
        if id(thing) not in self._number:
            self._alive.append(thing)
            fields = dataclasses.fields(thing)
            own = {f.name: getattr(thing, f.name) for f in fields if hasattr(thing, f.name)}
            if isinstance(thing, Source):  # which keeps its names, too, and they are of this process
                own = {f.name: own[f.name] for f in fields if f.init}
            else:
                own |= getattr(thing, "__dict__", {})
            written = [type(thing).__module__, type(thing).__name__, {k: self.write(v) for k, v in own.items()}]
            self._number[id(thing)] = len(self.objects)  # after those that it holds
            self.objects.append(written)
        return self._number[id(thing)]

    def _tensor(self, tensor: FakeTensor) -> int:
        if id(tensor) not in self._number:
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.constant is not None:
                raise Unreadable("it has a tensor of another kind")
            key = storage_key(tensor)
            if key not in self._storages:
                self._storages[key] = len(self.storages)
                self.storages.append((tensor.untyped_storage().nbytes(), str(tensor.device)))
            place = (self._storages[key], tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            self._number[id(tensor)] = len(self.tensors)
            self.tensors.append((*place, str(tensor.dtype).removeprefix("torch."), tensor.requires_grad))
            self._alive.append(tensor)
        return self._number[id(tensor)]


_NESTED: dict[Any, str] = {
    tuple: "tuple",
    list: "list",
    fx.immutable_collections.immutable_list: "list",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    OrderedSet: "list",
}
_MADE: dict[str, Any] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset, "size": torch.Size}


class _Reader:
    """What `_Writer` has written: it makes containers and objects that hold metadata, and calls nothing else."""

    def __init__(self, tensors: Sequence[torch.Tensor], objects: Sequence[Any]) -> None:
        self._tensors, self._objects = tensors, list[Any]()
        for module, name, own in objects:
            kind = _class(module, name, holds=True)
            read = {key: self.read(value) for key, value in own.items()}
            made = kind(**read) if issubclass(kind, Source) else object.__new__(kind)
            for key, value in () if issubclass(kind, Source) else read.items():
                object.__setattr__(made, key, value)
            self._objects.append(made)

    def read(self, written: Any) -> Any:
        """The thing."""
        if not isinstance(written, list):
            return written
        kind, *rest = written
        if kind in _MADE:
            return _MADE[kind](map(self.read, rest))
        if kind == "dict":
            made: Any = collections.OrderedDict() if rest[0] == "OrderedDict" else {}
            made.update((self.read(key), self.read(value)) for key, value in rest[1:])
            return collections.defaultdict(list, made) if rest[0] == "defaultdict" else made
        if kind == "slice":
            return slice(*map(self.read, rest))
        if kind == "type":
            return _class(*rest)
        if kind == "enum":
            return _class(rest[0], rest[1], holds=True)[rest[2]]
        return self._leaf(kind, rest[0])

    def _leaf(self, kind: str, value: Any) -> Any:
        if kind in ("float", "complex"):
            return {"float": float, "complex": complex}[kind](value)
        if kind == "node":
            return _Node(value)
        if kind == "tensor":
            return self._tensors[value]
        if kind == "object":
            return self._objects[value]
        if kind == "device":
            return torch.device(value)
        if kind == "operator":
            return operator.getitem if value == "getitem" else _operator(value)
        found = getattr(torch, value) if kind == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
        if kind == "module" and value in sys.modules:
            return _source.GlobalSource(_ALIAS + value)
        raise Unreadable(f"it has a {kind} that is not there: {value}")


def _class(module: str, name: str, holds: bool = False) -> Any:
    """A class that is there: one that `holds` metadata, or one that may be mentioned."""
    found: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
    metadata = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
    if module in _HOLDERS and metadata:
        return found
    if not holds and (found in pytree.SUPPORTED_NODES or (module.startswith("torch") and isinstance(found, type))):
        return found
    if not holds and isinstance(found, type) and module == "builtins":
        return found
    raise Unreadable(f"it names {module}.{name}")


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise Unreadable(f"{name} is no operator")
    return found


def traced_code(graph: Any) -> list[Any]:
    """The code objects that Dynamo has run to make a graph."""
    return list(graph._dynamo_bytecode_flatten.out.graph_capture_output.traced_code)


def _aliases(graph: Any) -> dict[str, str]:
    """The names by which Dynamo finds Python modules among the globals of the code that is called."""
    captured = graph._dynamo_bytecode_flatten.out.graph_capture_output
    found = dict(captured.import_sources)
    builtins_name = captured.output_graph.name_of_builtins_dict_key_in_fglobals
    if builtins_name is not None:
        found[builtins_name] = "builtins"
    for name, value in captured.f_globals.items():
        if value is torch and re.fullmatch(rf"_{id(torch)}_c.+", name):
            found[name] = "torch"
    return found


def readings(graph: Any) -> Iterator[tuple[tuple[Any, str], ...]]:
    """What tracing read of Python's state, by its guards: each step from a variable to it, with the name in it."""
    aliases = _aliases(graph)
    for guard in graph._dynamo_bytecode_flatten.out.graph_capture_output.output_graph.guards:
        steps: list[tuple[Any, str]] = []
        source: Any = guard.originating_source
        while isinstance(source, Source) and source.name:
            step = next((getattr(source, n) for n in ("member", "index", "global_name") if hasattr(source, n)), "")
            step = os.fsdecode(step) if isinstance(step, bytes) else step
            steps.append((source, step if isinstance(step, str) and step not in aliases else ""))
            source = getattr(source, "base", None)
        yield tuple(reversed(steps))


def pack(graph: Any, descriptor: Any) -> bytes:
    """A capture as bytes.

    Args:
        graph: as Dynamo made it.

    Raises:
        Unreadable: it has something that another process could not read.
    """
    for node in graph.graph.nodes:
        root = str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]
        if node.op == "call_module" or (node.op == "call_function" and root not in _ROOTS):
            raise Unreadable(f"{node.target} is left to autograd as it is, and its code was not traced")
    capture, state = descriptor._aot_graph_capture, descriptor._aot_state
    if capture.maybe_subclass_meta is not None:
        raise Unreadable("it has tensors of classes of their own")
    nodes = {node: index for index, node in enumerate(capture.graph_module.graph.nodes)}
    found = graph._dynamo_bytecode_flatten.out.graph_capture_output
    body = {
        "nodes": [_node(node) for node in nodes],
        "state": (state.needs_autograd, state.flat_args, state.flat_args_descs, state.fw_metadata, state.aot_config),
        "capture": (capture.wrappers, capture.updated_flat_args, capture.updated_flat_args_descs),
        "specs": (descriptor.params_spec, descriptor.buffers_spec, descriptor.in_spec, descriptor.out_spec),
        "guards": _guards(found),
        "modules": sorted(set(_aliases(graph).values())),
    }
    writer = _Writer(nodes, _aliases(graph))
    written = writer.write(body)
    parts = {"storages": writer.storages, "tensors": writer.tensors, "objects": writer.objects, "body": written}
    return json.dumps(parts, separators=(",", ":")).encode()


def _node(node: fx.Node) -> tuple[Any, ...]:
    if node.op not in ("placeholder", "call_function", "output"):
        raise Unreadable(f"its graph has a {node.op}")
    known = isinstance(node.target, (str, torch._ops.OpOverload)) or node.target is operator.getitem
    if not known or (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _NAMESPACES):
        raise Unreadable(f"its graph calls {node.target}, which is not torch's")
    notes = {k: v for k, v in node.meta.items() if isinstance(v, _PLAIN) and k not in _LEFT}
    notes |= {key: node.meta[key] for key in ("val", "desc") if key in node.meta}
    stacks = {key: sys.intern(list(node.meta[key].values())[-1][0]) for key in _STACKS if node.meta.get(key)}
    return node.op, node.name, node.target, node.args, node.kwargs, notes, stacks


_ROOTS = frozenset({"torch", "_operator", "operator", "builtins", "math"})
"""Packages whose functions Dynamo leaves in a graph: a version stands for them."""

_NAMESPACES = frozenset({"aten", "prims", "prim"})


def _guards(found: Any) -> dict[str, Any]:
    """The guards of a capture, without what they were built on.

    Raises:
        Unreadable: they hold for this process only.
    """
    graph = found.output_graph
    odd = graph.torch_function_mode_stack or graph.functorch_layers or graph.aotautograd_guards or graph.export
    if odd or graph.dual_level != -1 or graph.export_constraints:
        raise Unreadable("it was traced under modes of torch")
    guards: list[Any] = []
    for guard in graph.guards:
        made, name = guard.create_fn, guard.create_fn_name()
        if name == "SHAPE_ENV":
            if guard.code_list:
                raise Unreadable("a guard holds for sizes")
            continue
        given = dict(made.keywords) if isinstance(made, functools.partial) else {}
        if name == "TENSOR_MATCH":
            given.pop("value", None)
        if isinstance(made, functools.partial) and made.args:
            raise Unreadable(f"a guard is {name} with arguments")
        guards.append((guard.originating_source, name, given))
    sizes = {source: dict(info) for source, info in graph.input_source_to_sizes_strides.items()}
    return {
        "guards": guards,
        "order": list(graph.guard_on_key_order),
        "sizes": sizes,
        "device": graph.current_device,
    }


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """Whatever goes wrong inside is the bytes' fault."""
    try:
        yield
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def unpack(data: bytes, mode: FakeTensorMode | None, scope: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """A capture from its bytes: its descriptor, and what makes the root of its guards from local variables and code.

    Args:
        mode: of the call's fake tensors, if it has some.
        scope: the globals of the code that is called, to which the guards' own names are added.

    Raises:
        Unreadable: these are no bytes of a capture, or one of something that is not there.
    """
    with _unreadable():
        parts = json.loads(data)
        if mode is None:
            mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        tensors = _fake_tensors(mode, parts["storages"], parts["tensors"])
        body = _Reader(tensors, parts["objects"]).read(parts["body"])
        for name in body["modules"]:
            module = sys.modules[name]
            scope[_ALIAS + name] = vars(module) if module is builtins else module
        needs_autograd, flat_args, flat_descs, metadata, config = body["state"]
        wrappers, updated, updated_descs = body["capture"]
        graph = _graph(body["nodes"])
        graph.shape_env = mode.shape_env  # as AOTAutograd leaves it
        state = _schemas.AOTState(needs_autograd, flat_args, flat_descs, metadata, config, contextlib.ExitStack(), mode)
        made = _schemas.AOTGraphCapture(wrappers, graph, updated, updated_descs, None)
        params, buffers, in_spec, out_spec = body["specs"]
        descriptor = _schemas.JointWithDescriptors(state, made, params, buffers, in_spec, out_spec)
        return descriptor, functools.partial(_root, body["guards"], scope)


def _fake_tensors(mode: FakeTensorMode, storages: Sequence[Any], rows: Sequence[Any]) -> list[torch.Tensor]:
    memory_of: Any = torch.UntypedStorage
    held = [(memory_of(size, device="meta"), torch.device(device)) for size, device in storages]
    made: list[torch.Tensor] = []
    with torch.no_grad():
        for storage, offset, shape, strides, dtype, requires_grad in rows:
            memory, device = held[storage]
            found = torch.empty(0, dtype=getattr(torch, dtype), device="meta").set_(memory, offset, shape, strides)
            made.append(FakeTensor(mode, found, device).requires_grad_(requires_grad))
    return made


def _graph(rows: Sequence[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def there(value: Any) -> Any:
        return nodes[value.index] if type(value) is _Node else value

    for op, name, target, args, kwargs, notes, stacks in rows:
        made = graph.create_node(op, target, _with_nodes(args, there), _with_nodes(kwargs, there), name)
        made.meta.update(notes)
        made.meta.update({key: {"": (path,)} for key, path in stacks.items()})
        nodes.append(made)
        if made.name != name:
            raise Unreadable(f"two nodes are called {name}")
    graph.lint()
    return _LazyGraphModule(torch.nn.Module(), graph)


def _with_nodes(value: Any, there: Callable[[Any], Any]) -> Any:
    if type(value) is _Node:
        return there(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_with_nodes(each, there) for each in value)
    if isinstance(value, dict):
        return {key: _with_nodes(each, there) for key, each in value.items()}
    return value


def _root(found: dict[str, Any], scope: dict[str, Any], code: Any, local: dict[str, Any]) -> Any:
    """Guards that hold for what is there now."""
    with _unreadable():
        guards = {
            Guard(
                source,
                functools.partial(getattr(GuardBuilder, name), **given) if given else getattr(GuardBuilder, name),
            )
            for source, name, given in found["guards"]
        }
        state: Any = OutputGraphGuardsState(
            local_scope=local,
            global_scope=scope,
            torch_function_mode_stack=[],
            guard_on_key_order=set(found["order"]),
            input_source_to_sizes_strides=found["sizes"],
            dual_level=-1,
            functorch_layers=[],
            current_device=found["device"],
            global_state_guard=torch._C._dynamo.guards.GlobalStateGuard(),
            _guards=GuardsSet(OrderedSet(guards)),
            _aotautograd_guards=[],
            name_of_builtins_dict_key_in_fglobals=_ALIAS + "builtins",
        )
        return CheckFunctionManager(code, state).guard_manager.root
