"""Inductor called: with a partition of ours, without compiling a kernel, or on a graph alone.

Kernels fuse where a plan's order stays, and operators of ours say what is written to memory, and in which layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from functorch.compile import config as functorch_config
from torch import fx

from ..tracing import only_real_tensors
from ..versions import lacking, require, required
from .code import Generated, generated, input_strides

with required("a plan under Inductor"):
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._functorch._aot_autograd.graph_compile import collect_bw_donated_buffer_idxs
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor import config as config
    from torch._inductor import inductor_prims as _prims  # noqa: F401  defines torch.ops.prims.inductor_*
    from torch._inductor.choices import InductorChoices
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.fusion_regions import is_fusible_node as is_fusible_node
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import ExternKernel, FlexibleLayout, get_stride_order
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

require(
    lacking(
        (
            (compile_fx.compile_fx, ("model_", "example_inputs_", "inner_compile", "config_patches")),
            (compile_fx.compile_fx_forward, ("gm", "num_orig_model_outputs", "compiler_config_extra", "inner_compile")),
            (compile_fx.compile_fx_backward, ("gm", "compiler_config_extra", "inner_compile")),
            (compile_fx._InProcessFxCompile.codegen_and_compile, ("gm", "inputs_to_check", "graph_kwargs")),
            (AOTAutogradCache.save, ("key", "entry")),
            (collect_bw_donated_buffer_idxs, ("fw_module", "bw_module", "fw_metadata")),
            (InductorChoices.can_fuse_horizontal, ("scheduler", "node1", "node2")),
            (InductorChoices.can_fuse_vertical, ("scheduler", "node1", "node2")),
        ),
        (
            (config, "custom_partitioner_fn"),
            (config, "inductor_choices_class"),
            (V, "set_choices_handler"),
            (functorch_config, "force_non_lazy_backward_lowering"),
            (functorch_config, "enable_autograd_cache"),
            (GraphLowering, "compile_to_module"),
            (GraphLowering, "codegen"),
            (FlexibleLayout, "contiguous_strides"),
        ),
    ),
    "the part for plans under Inductor",
)


@contextlib.contextmanager
def replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    """Inside, a class has another attribute: for what Inductor has no setting for."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


CONVOLUTIONS = frozenset({torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default})


class PlanOrder(InductorChoices):
    """Inductor's own choices, but for fusions that pull other kernels out of the plan's order.

    A fused kernel runs where the first of its parts stood. What the later part still waits for is run before, with all
    that this holds in memory: a recomputation fused with a kernel far ahead of it, by a mask that both read, is done by
    then. The order of the graph is the plan's.

    Beside convolutions sums stay together: how much else is in their kernel decides whether the rest of a vector is
    summed in vectors, too, and so how its sums round.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether two kernels that read the same may become one."""
        if not InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        sums = node1.is_reduction() and node2.is_reduction()
        return (sums and _has_convolutions()) or not _pulls_others(scheduler, node1, node2)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether a kernel and one that reads what it writes may become one."""
        allowed = InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)
        return allowed and not _pulls_others(scheduler, node1, node2)

    def uuid(self) -> str:
        """For the keys of Inductor's caches."""
        return "remat PlanOrder 1"


def _has_convolutions() -> bool:
    lowered: Any = V.graph.module
    return any(node.target in CONVOLUTIONS for node in lowered.graph.nodes)


def _pulls_others(scheduler: Any, node1: Any, node2: Any) -> bool:
    first, later = sorted((node1, node2), key=lambda node: int(node.min_order))
    awaited = (scheduler.name_to_fused_node.get(name) for name in later.ancestors)
    return any(n is not None and n is not first and n is not later and n.min_order > first.max_order for n in awaited)


def fusing(choices: InductorChoices) -> contextlib.AbstractContextManager[Any]:
    """Let these choices be made inside: the setting alone is read once in a thread's life."""
    handler: contextlib.AbstractContextManager[Any] = V.set_choices_handler(choices)
    return handler


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


_library.define("channels_last_cat(Tensor[] tensors, int dim=0) -> Tensor")
_library.impl("channels_last_cat", lambda tensors, dim=0: torch.cat(tensors, dim), "CompositeExplicitAutograd")
torch.library.register_fake("remat::channels_last_cat", lambda tensors, dim=0: torch.cat(tensors, dim), lib=_library)
channels_last_cat: Any = torch.ops.remat.channels_last_cat.default
"""Tensors side by side in channels last. Inductor fixes the layout of a `cat` when it lowers it: by what it reads, if
that is in memory already, else by the metadata. What is stored in another one later is a copy of it all."""


@register_lowering(channels_last_cat, type_promotion_kind=None)
def _lower_cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    usual = FlexibleLayout.contiguous_strides

    def channels_last(sizes: Sequence[Any]) -> Any:
        return FlexibleLayout.stride_ordered(sizes, (3, 0, 2, 1)) if len(sizes) == 4 else usual(sizes)

    with replaced(FlexibleLayout, "contiguous_strides", staticmethod(channels_last)):
        return lowerings[torch.ops.aten.cat.default](list(tensors), dim)


class _Stop(Exception):
    def __init__(self, generated: Generated) -> None:
        super().__init__("dry run")
        self.generated = generated


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: CustomPartitionerFn,
    options: Mapping[str, Any],
    seen: Callable[[bool, Generated], None],
    cached: bool = True,
    stored: Callable[[], bool] = lambda: True,
) -> Callable[..., Any]:
    """A module of Dynamo's under Inductor, partitioned by `partition`; `seen` is told what is generated.

    The backward graph is compiled at once: left to the first call of backward(), it would run outside of `options`.

    Args:
        cached: unless set, `partition` is always called: no earlier compilation is taken from AOTAutograd's cache.
        stored: asked after the compilation, whether it goes into that cache.
    """
    save = AOTAutogradCache.save

    def saved(*args: Any, **kwargs: Any) -> None:
        if stored():
            save(*args, **kwargs)

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        to_module = GraphLowering.compile_to_module

        def told(graph: Any) -> Any:
            made = to_module(graph)
            seen(bool(kwargs.get("is_backward")), generated(graph))
            return made

        with replaced(GraphLowering, "compile_to_module", told):
            return compile_fx.compile_fx_inner(gm, inputs, **kwargs)

    ours = {"custom_partitioner_fn": partition, "inductor_choices_class": PlanOrder}
    settings = {"force_non_lazy_backward_lowering": True} | ({} if cached else {"enable_autograd_cache": False})
    own_save = replaced(AOTAutogradCache, "save", staticmethod(saved))
    with functorch_config.patch(settings), fusing(PlanOrder()), own_save:
        function: Any = compile_fx.compile_fx(
            module, example_inputs, inner_compile=inner, config_patches=dict(options) | ours
        )
    compiled: Callable[..., Any] = function
    return compiled


def dry_run(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> tuple[Generated, Generated]:
    """What Inductor would generate for two graphs, by its own passes, fusion and order; no kernel is compiled.

    Must be called where Inductor partitions. The graphs are left as they are.
    """
    with _partitioned(forward, backward, forward_outputs) as extra:
        first = _stopped(
            compile_fx.compile_fx_forward,
            copied(forward),
            _inputs(forward),
            num_orig_model_outputs=forward_outputs,
            num_example_inputs=len(_inputs(forward)),
            compiler_config_extra=extra,
        )
        second = _stopped(
            compile_fx.compile_fx_backward,
            copied(backward),
            _restrided(_inputs(backward), first.strides[forward_outputs:]),
            compiler_config_extra=extra,
        )
    return first, second


class Plain(NamedTuple):
    """Of plain Inductor's code, by node.

    Attributes:
        saved: the strides of what the forward pass saves.
        forward, backward: the strides of what each pass writes to memory.
        reads: the strides of what each kernel of torch's own reads.
        kernels: the source text of Inductor's own kernels.
    """

    saved: Mapping[str, tuple[int, ...]]
    forward: Mapping[str, tuple[int, ...]]
    backward: Mapping[str, tuple[int, ...]]
    reads: Mapping[str, tuple[tuple[int, ...], ...]]
    kernels: frozenset[str]


def plain_code(joint: fx.GraphModule, forward_outputs: int, **options: Any) -> Plain:
    """The kernels and layouts of the code that Inductor would generate for a joint graph by its own partition.

    Must be called where Inductor partitions, with the options of its partitioner. The graph is left as it is.
    """
    forward, backward = min_cut_rematerialization_partition(
        copied(joint), (), num_fwd_outputs=forward_outputs, **options
    )
    with fusing(InductorChoices()):
        first, second = dry_run(forward, backward, forward_outputs)
    nodes: Any = forward.graph.output_node().args[0]
    named = zip(nodes[forward_outputs:], first.strides[forward_outputs:], strict=False)
    saved = {n.name: s for n, s in named if isinstance(n, fx.Node) and n.op == "call_function" and s is not None}
    run = [event.node for event in (*first.events, *second.events) if event.node is not None]
    reads = {node.name: input_strides(node) for node in run}
    return Plain(saved, first.stored, second.stored, reads, first.kernels | second.kernels)


@contextlib.contextmanager
def _partitioned(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> Iterator[Any]:
    """What AOTAutograd fills in once it has looked at a partition, and what Inductor's compilers then take."""
    context: Any = TracingContext.get()
    before = context.fw_metadata
    context.fw_metadata = _Metadata(before, forward, backward, forward_outputs)
    try:
        yield compile_fx.create_compiler_config_extra(forward)
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
        if functorch_config.donated_buffer:
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
        to_check = compile_fx.get_input_idxs_to_check(inputs, graph["static_input_idxs"])
        with only_real_tensors(), DebugContext():
            compile_fx._InProcessFxCompile().codegen_and_compile(gm, inputs, to_check, graph)  # type: ignore[arg-type]
        raise AssertionError("unreachable")

    def stop(self: Any) -> Any:
        self.codegen()
        raise _Stop(generated(self))

    try:
        with replaced(GraphLowering, "compile_to_module", stop):
            compiler(*args, inner_compile=inner, **kwargs)
    except _Stop as stopped:
        return stopped.generated
    return Generated((), (), (), (), 0)


def prefers_channels_last(module: fx.GraphModule) -> bool:
    """Whether Inductor runs a graph's convolutions in channels last, whatever the layouts of its metadata."""
    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def is_seed(node: fx.Node) -> bool:
    """Whether a node draws the seeds of a pass: what must never be drawn twice."""
    return node.target in (torch.ops.prims.inductor_seeds.default, torch.ops.prims.inductor_seed.default)


def run(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A graph of ATen operators as Inductor compiles it alone, a function that takes its inputs in a list."""
    with tracing(None), only_real_tensors(), torch.no_grad():
        compiled = compile_fx.compile_fx_inner(module, list(inputs), is_inference=True)
    function: Callable[[list[Any]], Any] = compiled
    return function
