"""What Inductor generates, as far as memory is concerned: allocations, reuses, frees and calls, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..operators import OpOverload, is_mutable
from ..versions import lacking, require, required

with required("a plan under Inductor"):
    from torch._inductor.codegen import wrapper
    from torch._inductor.codegen.common import WorkspaceArg
    from torch._inductor.ir import ComputedBuffer, FixedLayout
    from torch._inductor.utils import get_dtype_size

_LINES = (
    "AllocateLine",
    "FreeIfNotReusedLine",
    "FreeLine",
    "ReuseLine",
    "ReinterpretLine",
    "ExternKernelAllocLine",
    "ExternKernelOutLine",
    "MultiOutputLine",
)

require(lacking((), tuple((wrapper, name) for name in _LINES)), "the part for plans under Inductor")


@dataclass(frozen=True)
class Event:
    """One line of generated code that concerns memory.

    Kinds:
        alloc: `name` gets `size` bytes of its own; unless held otherwise, it goes when `source` does.
        alias: `name` stands for what `source` stands for.
        free: `name` stands for nothing any more.
        call: a kernel of torch's own runs; `node` is what it was in the graph.

    `origins` are the nodes that an allocation or a call was generated for.
    """

    kind: str
    name: str
    source: str = ""
    size: int = 0
    node: fx.Node | None = None
    origins: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, eq=False)
class Generated:
    """What Inductor generates for one graph, as far as memory is concerned.

    Attributes:
        events: in the order in which the generated code runs.
        inputs: the names of the graph's inputs, in order.
        outputs: the names of what it returns, in order; None where that is not a buffer.
        strides: of the returned tensors, or None.
        estimate_bytes: the peak that Inductor's scheduler estimates after fusion, freeable inputs included.
        stored: node → strides, of the tensors that its own kernels write to memory.
        kernels: the source text of its own kernels.
    """

    events: tuple[Event, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    estimate_bytes: int
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()


def generated(graph: Any) -> Generated:
    """A lowered graph whose code has been generated, as plain data."""
    events: list[Event] = []
    for line in graph.wrapper_code.lines:
        events.extend(_events(graph, line))
    estimate = getattr(graph.wrapper_code, "estimate_peak", None)
    strides: list[tuple[int, ...] | None] = []
    for out in graph.graph_outputs or ():
        try:
            strides.append(tuple(int(s) for s in out.get_layout().stride))
        except (AttributeError, NotImplementedError, TypeError):
            strides.append(None)
    return Generated(
        events=tuple(events),
        inputs=tuple(graph.graph_input_names),
        outputs=tuple(_output(out) for out in graph.graph_outputs or ()),
        strides=tuple(strides),
        estimate_bytes=0 if estimate is None else int(estimate.overall_peak_memory),
        stored=_stored(graph),
        kernels=frozenset(graph.wrapper_code.src_to_kernel),
    )


def _stored(graph: Any) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for buffer in graph.buffers:
        node = buffer.get_origin_node() if isinstance(buffer, ComputedBuffer) else None
        if node is not None and isinstance(buffer.layout, FixedLayout):
            found[node.name] = tuple(int(s) for s in buffer.layout.stride)
    return found


def _output(out: Any) -> str | None:
    try:
        return str(out.get_name())
    except (AttributeError, NotImplementedError):
        return None


def _events(graph: Any, line: Any) -> Iterator[Event]:
    w = wrapper
    if isinstance(line, w.AllocateLine):
        yield Event("alloc", line.node.get_name(), size=_size(graph, line.node), origins=_origins(line.node))
    elif isinstance(line, w.ReuseLine):
        old = line.node.get_name()
        yield Event("alias", line.reused_as.get_name(), source=old)
        if line.delete_old and old not in graph.get_output_names():
            yield Event("free", old)
    elif isinstance(line, w.ReinterpretLine):
        yield Event("alias", line.reused_as.get_name(), source=line.node.get_name())
    elif isinstance(line, w.FreeLine) or (isinstance(line, w.FreeIfNotReusedLine) and not line.is_reused):
        yield Event("free", line.node.get_name())
    elif isinstance(line, w.ExternKernelAllocLine):
        yield from _extern(graph, line.node)
    elif isinstance(line, w.ExternKernelOutLine):
        yield Event("call", line.node.get_name(), node=_as_run(line.node), origins=_origins(line.node))
    elif isinstance(line, w.MultiOutputLine):
        yield Event("alias", line.result_name, source=line.arg_name + _indices(line))


def _extern(graph: Any, node: Any) -> Iterator[Event]:
    name, layout, origins = node.get_name(), type(node.layout).__name__, _origins(node)
    if layout == "MultiOutputLayout":
        yield Event("alloc", name)
        for output in filter(None, getattr(node, "outputs", ())):
            yield Event("alloc", name + _indices(output), source=name, size=_size(graph, output), origins=origins)
    elif layout != "NoneLayout":
        if node.get_inputs_that_alias_output():
            yield Event("alias", name, source=node.get_inputs_that_alias_output()[0])
        else:
            yield Event("alloc", name, size=_size(graph, node), origins=origins)
    yield Event("call", name, node=_as_run(node), origins=origins)


def _origins(buffer: Any) -> tuple[fx.Node, ...]:
    """The nodes that a buffer was made for; a workspace of a generated kernel (`WorkspaceArg`) names none."""
    if isinstance(buffer, WorkspaceArg):
        return ()
    return tuple(sorted(buffer.get_origins(), key=lambda node: str(node.name)))


def _as_run(kernel: Any) -> fx.Node | None:
    """The node that a kernel of torch's own was, its inputs in the layouts that Inductor has chosen for them."""
    overload = getattr(kernel, "op_overload", None)
    node = kernel.get_origin_node() or next((n for n in _origins(kernel) if n.target is overload), None)
    if node is None or not isinstance(node.target, OpOverload) or is_mutable(node.target):
        return None
    every = _read(node)
    if any(not isinstance(source.meta.get("val"), torch.Tensor) for source in every):
        return None
    given = [i for i in kernel.inputs if hasattr(i, "get_size")]
    strides: dict[fx.Node, tuple[int, ...]] = {}
    for source, chosen in zip(every, given, strict=True) if len(given) == len(every) else ():
        with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
            strides.setdefault(source, tuple(int(s) for s in chosen.get_stride()))
    return alone(node, [strides.get(source) for source in dict.fromkeys(every)])


def alone(node: fx.Node, strides: Sequence[tuple[int, ...] | None]) -> fx.Node:
    """A kernel in a graph of its own, each of its inputs in these strides, or in its own where there are none."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for source, stride in zip(dict.fromkeys(_read(node)), strides, strict=True):
        value = source.meta["val"]
        if stride is not None and len(stride) == value.dim():
            value = value.new_empty_strided(value.size(), stride)
        env[source] = graph.placeholder(source.name)
        env[source].meta["val"] = value
    made = graph.node_copy(node, env.__getitem__)
    made.meta = {"val": node.meta.get("val")}
    return made


def input_strides(kernel: fx.Node) -> tuple[tuple[int, ...], ...]:
    """The strides of the inputs of a kernel that is `alone`."""
    return tuple(tuple(source.meta["val"].stride()) for source in dict.fromkeys(_read(kernel)))


def _read(node: fx.Node) -> list[fx.Node]:
    """What a node reads, in the order of its arguments, and as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _indices(item: Any) -> str:
    return "".join(f"[{i}]" for _, i in item.indices)


def _size(graph: Any, node: Any) -> int:
    length = graph.sizevars.optimization_hint(graph.get_allocation_storage_size(node), fallback=0)
    return int(length) * int(get_dtype_size(node.get_dtype()))
