"""Every private name of Inductor that the client uses, behind a self-test of its own; imported only when asked for."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from . import _compat

try:
    import torch._functorch.config as _functorch_config
    from torch._functorch._aot_autograd.graph_compile import collect_bw_donated_buffer_idxs
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx as _compile_fx
    from torch._inductor import config
    from torch._inductor import inductor_prims as _prims  # noqa: F401  defines torch.ops.prims.inductor_*
    from torch._inductor.codegen import wrapper as _wrapper
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.fusion_regions import is_fusible_node
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import ComputedBuffer, ExternKernel, FixedLayout, get_stride_order
    from torch._inductor.lowering import register_lowering
    from torch._inductor.utils import get_dtype_size
except ImportError as error:
    raise ImportError(
        f"plans under Inductor need torch 2.13's Inductor, and torch {torch.__version__} lacks a part of it: {error}"
    ) from error

__all__ = [
    "Event",
    "Generated",
    "compile_graph",
    "config",
    "dry_run",
    "force_stride_order",
    "generated",
    "is_fusible_node",
    "is_seed",
    "materialized_copy",
    "plain_layouts",
    "prefers_channels_last",
    "run",
    "stored",
]


def missing() -> list[str]:
    """What this torch lacks of what plans under Inductor rely on: the self-test, run at import."""
    found: list[str] = []
    wanted: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
        (_compile_fx.compile_fx, ("model_", "example_inputs_", "inner_compile", "config_patches")),
        (_compile_fx.compile_fx_forward, ("gm", "num_orig_model_outputs", "compiler_config_extra", "inner_compile")),
        (_compile_fx.compile_fx_backward, ("gm", "compiler_config_extra", "inner_compile")),
        (_compile_fx._InProcessFxCompile.codegen_and_compile, ("gm", "inputs_to_check", "graph_kwargs")),
        (collect_bw_donated_buffer_idxs, ("fw_module", "bw_module", "fw_metadata")),
    )
    for function, names in wanted:
        parameters = inspect.signature(function).parameters
        found.extend(f"{function.__name__}({name}=…)" for name in names if name not in parameters)
    for owner, name in (
        (config, "custom_partitioner_fn"),
        (_functorch_config, "force_non_lazy_backward_lowering"),
        (_functorch_config, "enable_autograd_cache"),
        (GraphLowering, "compile_to_module"),
        (GraphLowering, "codegen"),
        *((_wrapper, name) for name in _LINES),
    ):
        if not hasattr(owner, name):
            found.append(f"{getattr(owner, '__name__', owner)}.{name}")
    return found


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

_MISSING = missing()
if _MISSING:
    raise ImportError(f"torch {torch.__version__} lacks what plans under Inductor rely on: {', '.join(_MISSING)}")


@dataclass(frozen=True)
class Event:
    """One line of generated code that concerns memory.

    Kinds:
        alloc: `name` gets `size` bytes of its own; unless held otherwise, it goes when `source` does.
        alias: `name` stands for what `source` stands for.
        free: `name` stands for nothing any more.
        call: a kernel of torch's own runs; `node` is what it was in the graph.
    """

    kind: str
    name: str
    source: str = ""
    size: int = 0
    node: fx.Node | None = None


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
    """

    events: tuple[Event, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    estimate_bytes: int
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class _Stop(Exception):
    def __init__(self, generated: Generated) -> None:
        super().__init__("dry run")
        self.generated = generated


class Partitioner(CustomPartitionerFn):
    """A partition function as Inductor's configuration wants it.

    The configuration is copied deeply more than once; copies are this very object, since what it holds can be copied
    neither cheaply nor at all. `key` enters the keys of Inductor's caches.
    """

    def __init__(self, partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], key: str) -> None:
        self.partition, self.key = partition, key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        # None would not keep Inductor from taking another plan's code out of its caches, whatever its docs say
        return self.key

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self.key,))  # all that a cache's key may know of it


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    key: str,
    options: Mapping[str, Any],
    seen: Callable[[bool, Generated], None],
    cached: bool = True,
) -> Callable[..., Any]:
    """A module of Dynamo's under Inductor, partitioned by `partition`; `seen` is told what is generated.

    Unless `cached`, `partition` is always called: no earlier compilation is taken from AOTAutograd's cache.
    The backward graph is compiled at once: left to the first call of backward(), it would run outside of `options`.
    """

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with _after_generation(lambda graph: seen(bool(kwargs.get("is_backward")), generated(graph))):
            return _compile_fx.compile_fx_inner(gm, inputs, **kwargs)

    patches = dict(options) | {"custom_partitioner_fn": Partitioner(partition, key)}
    settings = {"force_non_lazy_backward_lowering": True} | ({} if cached else {"enable_autograd_cache": False})
    with _functorch_config.patch(settings):
        function: Any = _compile_fx.compile_fx(module, example_inputs, inner_compile=inner, config_patches=patches)
    return function  # type: ignore[no-any-return]


def dry_run(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> tuple[Generated, Generated]:
    """What Inductor would generate for two graphs, by its own passes, fusion and order; no kernel is compiled.

    Must be called where Inductor partitions. The graphs are left as they are.
    """
    with _partitioned(forward, backward, forward_outputs) as extra:
        first = _dry_forward(forward, forward_outputs, extra)
        second = _stopped(
            _compile_fx.compile_fx_backward,
            copied(backward),
            _restrided(_inputs(backward), first.strides[forward_outputs:]),
            compiler_config_extra=extra,
        )
    return first, second


class Plain(NamedTuple):
    """Of plain Inductor's code, node → strides: what the forward pass saves, and what each pass writes to memory."""

    saved: Mapping[str, tuple[int, ...]]
    forward: Mapping[str, tuple[int, ...]]
    backward: Mapping[str, tuple[int, ...]]


def plain_layouts(joint: fx.GraphModule, forward_outputs: int, **options: Any) -> Plain:
    """The layouts in the code that Inductor would generate for a joint graph by its own partition.

    Must be called where Inductor partitions, with the options of its partitioner. The graph is left as it is.
    """
    forward, backward = min_cut_rematerialization_partition(
        copied(joint), (), num_fwd_outputs=forward_outputs, **options
    )
    first, second = dry_run(forward, backward, forward_outputs)
    nodes: Any = forward.graph.output_node().args[0]
    named = zip(nodes[forward_outputs:], first.strides[forward_outputs:], strict=False)
    saved = {n.name: s for n, s in named if isinstance(n, fx.Node) and n.op == "call_function" and s is not None}
    return Plain(saved, first.stored, second.stored)


def _dry_forward(forward: fx.GraphModule, forward_outputs: int, extra: Any) -> Generated:
    return _stopped(
        _compile_fx.compile_fx_forward,
        copied(forward),
        _inputs(forward),
        num_orig_model_outputs=forward_outputs,
        num_example_inputs=len(_inputs(forward)),
        compiler_config_extra=extra,
    )


@contextlib.contextmanager
def _partitioned(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> Iterator[Any]:
    """What AOTAutograd fills in once it has looked at a partition, and what Inductor's compilers then take."""
    context: Any = TracingContext.get()
    before = context.fw_metadata
    context.fw_metadata = _Metadata(before, forward, backward, forward_outputs)
    try:
        yield _compile_fx.create_compiler_config_extra(forward)
    finally:
        context.fw_metadata = before


class _Metadata:
    """AOTAutograd's metadata of a partition, as far as Inductor looks at them: which saved tensors it may overwrite."""

    num_symints_saved_for_bw = 0
    num_mutated_inp_runtime_indices = 0  # Inductor's graphs update buffers themselves

    def __init__(self, known: Any, forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
        self.static_input_indices = list(getattr(known, "static_input_indices", ()))
        self.num_forward = self.num_outputs = forward_outputs
        self.tensors_saved_for_backwards_slice = slice(forward_outputs, None)
        self.bw_donated_idxs: list[int] = []
        if _functorch_config.donated_buffer:
            self.bw_donated_idxs = collect_bw_donated_buffer_idxs(forward, backward, self)  # type: ignore[arg-type]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same nodes in a graph of their own: a pass over it leaves the original as it is."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {}, return_output_node=True)
    assert output is not None
    made = graph.output(output[0])  # type: ignore[index]
    made.meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def _inputs(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]


def _restrided(inputs: list[Any], strides: Sequence[tuple[int, ...] | None]) -> list[Any]:
    found = list(inputs)
    for i, stride in enumerate(strides):
        value = found[i]
        if stride is not None and isinstance(value, torch.Tensor) and tuple(value.stride()) != stride:
            found[i] = value.as_strided(value.size(), stride)
    return found


def _stopped(compiler: Callable[..., Any], *args: Any, **kwargs: Any) -> Generated:
    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **graph: Any) -> Any:
        graph.pop("compile_region_name", None)
        graph.setdefault("static_input_idxs", ())
        to_check = _compile_fx.get_input_idxs_to_check(inputs, graph["static_input_idxs"])
        with _compat.only_real_tensors(), DebugContext():
            _compile_fx._InProcessFxCompile().codegen_and_compile(gm, inputs, to_check, graph)  # type: ignore[arg-type]
        raise AssertionError("unreachable")

    def stop(self: Any) -> Any:
        self.codegen()
        raise _Stop(generated(self))

    try:
        with mock.patch.object(GraphLowering, "compile_to_module", stop):
            compiler(*args, inner_compile=inner, **kwargs)
    except _Stop as stopped:
        return stopped.generated
    return Generated((), (), (), (), 0)


@contextlib.contextmanager
def _after_generation(tell: Callable[[Any], None]) -> Iterator[None]:
    original = GraphLowering.compile_to_module

    def told(self: Any) -> Any:
        module = original(self)
        tell(self)
        return module

    with mock.patch.object(GraphLowering, "compile_to_module", told):
        yield


def generated(graph: Any) -> Generated:
    """A lowered graph whose code has been generated, as plain data."""
    events: list[Event] = []
    for line in graph.wrapper_code.lines:
        events.extend(_events(graph, line))
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
        estimate_bytes=_estimate(graph),
        stored=_stored(graph),
    )


def _stored(graph: Any) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for buffer in graph.buffers:
        node = buffer.get_origin_node() if isinstance(buffer, ComputedBuffer) else None
        if node is not None and isinstance(buffer.layout, FixedLayout):
            found[node.name] = tuple(int(s) for s in buffer.layout.stride)
    return found


def _estimate(graph: Any) -> int:
    estimate = getattr(graph.wrapper_code, "estimate_peak", None)
    return int(estimate.overall_peak_memory) if estimate is not None else 0


def _output(out: Any) -> str | None:
    try:
        return str(out.get_name())
    except (AttributeError, NotImplementedError):
        return None


def _events(graph: Any, line: Any) -> Iterator[Event]:
    w = _wrapper
    if isinstance(line, w.AllocateLine):
        yield Event("alloc", line.node.get_name(), size=_size(graph, line.node))
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
        yield Event("call", line.node.get_name(), node=_as_run(line.node))
    elif isinstance(line, w.MultiOutputLine):
        yield Event("alias", line.result_name, source=line.arg_name + _indices(line))


def _extern(graph: Any, node: Any) -> Iterator[Event]:
    name, layout = node.get_name(), type(node.layout).__name__
    if layout == "MultiOutputLayout":
        yield Event("alloc", name)
        for output in filter(None, getattr(node, "outputs", ())):
            yield Event("alloc", name + _indices(output), source=name, size=_size(graph, output))
    elif layout != "NoneLayout":
        if node.get_inputs_that_alias_output():
            yield Event("alias", name, source=node.get_inputs_that_alias_output()[0])
        else:
            yield Event("alloc", name, size=_size(graph, node))
    yield Event("call", name, node=_as_run(node))


def _as_run(kernel: Any) -> fx.Node | None:
    """The node that a kernel of torch's own was, its inputs in the layouts that Inductor has chosen for them."""
    origins = sorted(kernel.get_origins(), key=lambda n: str(n.name))
    overload = getattr(kernel, "op_overload", None)
    node = kernel.get_origin_node() or next((n for n in origins if n.target is overload), None)
    if node is None or not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    known = {id(a): a for a in node.all_input_nodes}
    if any(not isinstance(a.meta.get("val"), torch.Tensor) for a in known.values()):
        return None
    graph = fx.Graph()
    given = [i for i in kernel.inputs if hasattr(i, "get_size")]
    tensors: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), tensors.append)
    env: dict[fx.Node, fx.Node] = {}
    for position, source in enumerate(tensors):
        if source in env:
            continue
        value = source.meta["val"]
        if len(given) == len(tensors):
            with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
                stride = tuple(int(s) for s in given[position].get_stride())
                if len(stride) == value.dim():
                    value = value.new_empty_strided(value.size(), stride)
        env[source] = graph.placeholder(source.name)
        env[source].meta["val"] = value
    made = graph.node_copy(node, env.__getitem__)
    made.meta = {"val": node.meta.get("val")}
    return made


def _indices(item: Any) -> str:
    return "".join(f"[{i}]" for _, i in item.indices)


def _size(graph: Any, node: Any) -> int:
    length = graph.sizevars.optimization_hint(graph.get_allocation_storage_size(node), fallback=0)
    return int(length) * int(get_dtype_size(node.get_dtype()))


force_stride_order: Any = torch.ops.prims.inductor_force_stride_order.default
"""Stores a tensor in an order of strides, which is then that of its value, too."""

materialized_copy: Any = torch.ops.aten.lift_fresh_copy.default
"""A copy that Inductor's removal of what does nothing leaves alone, unlike `clone`; lowered as one."""


_library: Any = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("stored(Tensor x, int[] strides) -> Tensor")
_library.impl("stored", lambda x, strides: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("remat::stored", lambda x, strides: torch.empty_like(x), lib=_library)
stored: Any = torch.ops.remat.stored.default
"""Stores a tensor in an order of strides, of which its value says nothing: Inductor's own choices change none, either,
and views of the value stay what they are."""


@register_lowering(stored, type_promotion_kind=None)
def _lower_stored(x: Any, strides: Sequence[int]) -> Any:
    return ExternKernel.require_stride_order(x, get_stride_order(strides))


def prefers_channels_last(module: fx.GraphModule) -> bool:
    """Whether Inductor runs a graph's convolutions in channels last, whatever the layouts of its metadata."""
    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def is_seed(node: fx.Node) -> bool:
    """Whether a node draws the seeds of a pass: what must never be drawn twice."""
    return node.target in (torch.ops.prims.inductor_seeds.default, torch.ops.prims.inductor_seed.default)


def run(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A graph of ATen operators as Inductor compiles it alone, a function that takes its inputs in a list."""
    with tracing(None), _compat.only_real_tensors(), torch.no_grad():
        compiled = _compile_fx.compile_fx_inner(module, list(inputs), is_inference=True)
    function: Callable[[list[Any]], Any] = compiled
    return function
