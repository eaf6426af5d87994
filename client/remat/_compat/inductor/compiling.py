"""Inductor called: with a partition of ours, without compiling a kernel, or on a graph alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..tracing import only_real_tensors
from .code import Generated, generated, input_strides
from .fusion import PlanOrder, fusing
from .parts import (
    AOTAutogradCache,
    CustomPartitionerFn,
    DebugContext,
    GraphLowering,
    InductorChoices,
    TracingContext,
    collect_bw_donated_buffer_idxs,
    compile_fx,
    functorch_config,
    min_cut_rematerialization_partition,
    replaced,
    tracing,
)


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
        with _after_generation(lambda graph: seen(bool(kwargs.get("is_backward")), generated(graph))):
            return compile_fx.compile_fx_inner(gm, inputs, **kwargs)

    ours = {"custom_partitioner_fn": partition, "inductor_choices_class": PlanOrder}
    settings = {"force_non_lazy_backward_lowering": True} | ({} if cached else {"enable_autograd_cache": False})
    own_save = replaced(AOTAutogradCache, "save", staticmethod(saved))
    with functorch_config.patch(settings), fusing(PlanOrder()), own_save:
        function: Any = compile_fx.compile_fx(
            module, example_inputs, inner_compile=inner, config_patches=dict(options) | ours
        )
    return function  # type: ignore[no-any-return]


def dry_run(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> tuple[Generated, Generated]:
    """What Inductor would generate for two graphs, by its own passes, fusion and order; no kernel is compiled.

    Must be called where Inductor partitions. The graphs are left as they are.
    """
    with _partitioned(forward, backward, forward_outputs) as extra:
        first = _dry_forward(forward, forward_outputs, extra)
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


def _dry_forward(forward: fx.GraphModule, forward_outputs: int, extra: Any) -> Generated:
    return _stopped(
        compile_fx.compile_fx_forward,
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


@contextlib.contextmanager
def _after_generation(tell: Callable[[Any], None]) -> Iterator[None]:
    original = GraphLowering.compile_to_module

    def told(self: Any) -> Any:
        module = original(self)
        tell(self)
        return module

    with replaced(GraphLowering, "compile_to_module", told):
        yield


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
