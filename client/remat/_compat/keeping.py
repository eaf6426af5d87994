"""A capture as bytes and back: what AOTAutograd made, and the guards of Dynamo, built again on what is there now.

Bytes are JSON: containers, and the objects of torch that hold metadata, by the names of their classes.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import functools
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch._aot_autograd.schemas as _schemas
from torch import fx
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.output_graph import OutputGraphGuardsState
from torch._guards import Guard, Source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .copying import MODULE_STACKS, fake_tensor, of_torch_or_python
from .guards import Guards
from .plain import ALIAS, PLAIN, Reader, Unreadable, Writer

__all__ = ["constant", "pack", "readings", "traced_code", "unpack"]

_LEFT = frozenset({"stack_trace", "tensor_meta"})
"""Of a node's notes, those that say nothing of what it does, and are long."""


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


def readings(graph: Any) -> tuple[Sequence[Any], Callable[[Any], tuple[Any, str]]]:
    """What tracing read of Python's state, by its guards, as sources.

    With them comes what tells of a source the one that it is a step from, or None, and the name in this step.
    """
    aliases = _aliases(graph)

    def is_one(source: Any) -> bool:
        return isinstance(source, Source) and bool(source.name)

    def step(source: Any) -> tuple[Any, str]:
        base = getattr(source, "base", None)
        name = next((getattr(source, n) for n in ("member", "index", "global_name") if hasattr(source, n)), "")
        name = os.fsdecode(name) if isinstance(name, bytes) else name
        known = isinstance(name, str) and name not in aliases
        return base if is_one(base) else None, name if known else ""

    guards = graph._dynamo_bytecode_flatten.out.graph_capture_output.output_graph.guards
    return list(filter(is_one, dict.fromkeys(guard.originating_source for guard in guards))), step


def pack(graph: Any, descriptor: Any) -> bytes:
    """A capture as bytes.

    Args:
        graph: as Dynamo made it.

    Raises:
        Unreadable: it has something that another process could not read.
    """
    state_names = {
        *dict(graph.named_parameters(remove_duplicate=False)),
        *dict(graph.named_buffers(remove_duplicate=False)),
    }
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target not in state_names:
            raise Unreadable(f"its graph reads {node.target}, which is neither parameter nor buffer")
        if node.op == "call_module" or (node.op == "call_function" and not of_torch_or_python(node.target)):
            raise Unreadable(f"{node.target} is left to autograd as it is, and its code was not traced")
    capture, state = descriptor._aot_graph_capture, descriptor._aot_state
    if capture.maybe_subclass_meta is not None:
        raise Unreadable("it has tensors of classes of their own")
    nodes = {node: index for index, node in enumerate(capture.graph_module.graph.nodes)}
    constants = {node.target: constant(capture.graph_module, node) for node in nodes if node.op == "get_attr"}
    found = graph._dynamo_bytecode_flatten.out.graph_capture_output
    body = {
        "state": (state.needs_autograd, state.flat_args, state.flat_args_descs, state.fw_metadata, state.aot_config),
        "capture": (capture.wrappers, capture.updated_flat_args, capture.updated_flat_args_descs),
        "specs": (descriptor.params_spec, descriptor.buffers_spec, descriptor.in_spec, descriptor.out_spec),
        "guards": _guards(found),
        "modules": sorted(set(_aliases(graph).values())),
    }
    writer = Writer(nodes, _aliases(graph))
    parts = {
        "body": writer.write(body),
        "nodes": [[*map(writer.write, _node(node))] for node in nodes],
        "constants": constants,
        "storages": writer.storages,
        "tensors": writer.tensors,
        "shapes": writer.shapes,
        "values": writer.values,
    }
    return json.dumps(parts, separators=(",", ":")).encode()


def _node(node: fx.Node) -> tuple[Any, ...]:
    if node.op not in ("placeholder", "call_function", "get_attr", "output"):
        raise Unreadable(f"its graph has a {node.op}")
    known = isinstance(node.target, (str, torch._ops.OpOverload)) or node.target is operator.getitem
    if not known or (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _NAMESPACES):
        raise Unreadable(f"its graph calls {node.target}, which is not torch's")
    notes = {k: v for k, v in node.meta.items() if isinstance(v, PLAIN) and k not in _LEFT}
    notes |= {key: node.meta[key] for key in ("val", "desc") if key in node.meta}
    stacks = {key: sys.intern(list(node.meta[key].values())[-1][0]) for key in MODULE_STACKS if node.meta.get(key)}
    return node.op, node.name, node.target, node.args, node.kwargs, notes, stacks


CONSTANT_BYTES = 1 << 16
"""Constants of the code, such as `torch.tensor([1.0, 2.0])`, are kept by value up to this size."""


def constant(module: fx.GraphModule, node: fx.Node) -> list[Any]:
    """A tensor that code makes of numbers, as its dtype, its shape and its bytes."""
    held = getattr(module, str(node.target), None)
    if type(held) is not torch.Tensor:
        raise Unreadable(f"{node.name} of its graph is a {type(held).__name__}, not a tensor of numbers")
    plain = held.device.type == "cpu" and held.layout is torch.strided and held.is_contiguous()
    if not plain or held.requires_grad or held.is_conj() or held.is_neg() or held.is_quantized:
        raise Unreadable(f"{node.name} of its graph is a tensor of another kind")
    if held.nbytes > CONSTANT_BYTES:
        raise Unreadable(f"{node.name} of its graph is a constant of {held.nbytes} bytes")
    words = base64.b64encode(bytes(held.reshape(-1).view(torch.uint8).tolist())).decode()
    return [str(held.dtype).removeprefix("torch."), list(held.shape), words]


def _held(dtype: str, shape: Sequence[int], words: str) -> torch.Tensor:
    """The tensor that `constant` wrote."""
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise Unreadable(f"{dtype} is no dtype")
    held = bytearray(base64.b64decode(words, validate=True))
    return (torch.frombuffer(held, dtype=kind) if held else torch.empty(0, dtype=kind)).reshape(shape).clone()


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
        guards.append((guard.originating_source, name, given or None))
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
        nodes: list[fx.Node] = []
        reader = Reader(tensors, nodes, parts["shapes"], parts["values"])
        body = reader.read(parts["body"])
        for name in body["modules"]:
            module = sys.modules[name]
            scope[ALIAS + name] = vars(module) if module is builtins else module
        needs_autograd, flat_args, flat_descs, metadata, config = body["state"]
        wrappers, updated, updated_descs = body["capture"]
        constants = {name: _held(*row) for name, row in parts["constants"].items()}
        graph = _graph(parts["nodes"], nodes, reader, constants)
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
            found = fake_tensor(mode, memory, (getattr(torch, dtype), offset, shape, strides), device)
            made.append(found.requires_grad_(requires_grad))
    return made


def _graph(
    rows: Sequence[Any], nodes: list[fx.Node], reader: Reader, constants: dict[str, torch.Tensor]
) -> fx.GraphModule:
    """The graph; its nodes are added to those that the reader knows."""
    graph = fx.Graph()
    for row in rows:
        op, name, target, args, kwargs, notes, stacks = map(reader.read, row)
        made = graph.create_node(op, target, args, kwargs, name)
        made.meta.update(notes)
        for key, path in stacks.items():
            made.meta[key] = {"": (path,)}
        nodes.append(made)
        if made.name != name:
            raise Unreadable(f"two nodes are called {name}")
        if op == "get_attr" and target not in constants:
            raise Unreadable(f"{name} is a constant that is not there")
    graph.lint()
    root = torch.nn.Module()
    for name, held in constants.items():
        root.register_buffer(name, held)
    return _LazyGraphModule(root, graph)


def _root(found: dict[str, Any], scope: dict[str, Any], code: Any, local: dict[str, Any]) -> Any:
    """Guards that hold for what is there now."""
    with _unreadable():
        guards: Any = [
            Guard(
                source,
                functools.partial(getattr(GuardBuilder, name), **given) if given else getattr(GuardBuilder, name),
            )
            for source, name, given in found["guards"]
        ]
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
            _guards=guards,
            _aotautograd_guards=[],
            name_of_builtins_dict_key_in_fglobals=ALIAS + "builtins",
        )
        return Guards(code, state).guard_manager.root
