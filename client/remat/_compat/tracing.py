"""Tracing: Dynamo's and AOTAutograd's entries, their fake tensors, and what they leave on the graphs that they make."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
from functorch.compile import config as functorch_config
from torch import fx
from torch._C._dynamo.eval_frame import reset_code as reset_code
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import trace_rules
from torch._dynamo.exc import InternalTorchDynamoError, TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._guards import CompileContext, TracingContext
from torch._guards import tracing as _tracing
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.node import _side_effectful_functions
from torch.utils._python_dispatch import _disable_current_modes

from .versions import lacking, require

require(
    lacking(
        (
            (aot_export_joint_with_descriptors, ("stack", "mod", "args", "kwargs")),
            (aot_compile_joint_with_descriptors, ("jd", "partition_fn", "fw_compiler", "bw_compiler")),
        ),
        (
            (_dynamo_config, "ignore_logging_functions"),
            (functorch_config, "donated_buffer"),
            (InstructionTranslator, "current_tx"),
            (simple_registry.singleton.find("aten::add.Tensor").effect, "register"),
        ),
    )
)


CHECKS = frozenset(
    {
        torch.ops.aten._linalg_check_errors.default,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
    }
)
"""Operators that make nothing and raise where their input is not as it must be."""


@contextlib.contextmanager
def checks_as_operators() -> Iterator[None]:
    """Inside, checks are traced as operators that stay in the graph, and not as effects that a token puts in order."""
    holders = [simple_registry.singleton.find(check.name()).effect for check in CHECKS]  # type: ignore[no-untyped-call]
    found = [holder.effect for holder in holders]
    added = CHECKS - _side_effectful_functions
    for holder in holders:
        holder.register(None)
    _side_effectful_functions.update(added)
    try:
        yield
    finally:
        _side_effectful_functions.difference_update(added)
        for holder, effect in zip(holders, found, strict=True):
            holder.register(effect)


_ONE_AT_A_TIME = threading.RLock()
"""Held while a joint graph is traced: torch.fx puts methods of all modules of the process in the place of others
meanwhile, and of two traces at once it would leave those of one there."""


def await_traces() -> None:
    """Wait until no other thread traces a joint graph: Dynamo takes any such trace for one around its own call, and
    raises."""
    with _ONE_AT_A_TIME:
        pass


def export_joint(module: torch.nn.Module, args: Sequence[Any], mode: Any = None) -> Any:
    """The joint forward-backward graph with descriptors.

    Args:
        mode: of fake arguments whose sizes may be symbols; None: the arguments are traced as they are.
    """
    context = None if mode is None else TracingContext(mode)
    with _ONE_AT_A_TIME, checks_as_operators(), _tracing(context), state_kept(), contextlib.ExitStack() as stack:
        without_hooks(module)  # they are in the graph
        return aot_export_joint_with_descriptors(stack, module, tuple(args), {})


@contextlib.contextmanager
def state_kept() -> Iterator[None]:
    """Grad mode and autocast are as before afterwards: a trace that an error ends may leave them as the code sets them
    in the place that it has come to."""
    grad, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    nesting = _autocasts()
    try:
        yield
    finally:
        while _autocasts() > nesting:
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch.set_grad_enabled(grad)


def _autocasts() -> int:
    """How many contexts of autocast are around."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def without_hooks(module: torch.nn.Module) -> None:
    """Let a captured graph run without the hooks of all modules, which are in it."""
    kind = type(module)
    if not hasattr(kind, "without_hooks"):
        own = {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs), "without_hooks": True}
        module.__class__ = type(kind.__name__, (kind,), own)


def joint_graph(descriptor: Any) -> fx.GraphModule:
    """The graph of an exported joint."""
    graph: fx.GraphModule = descriptor.graph_module
    return graph


def forward_outputs(descriptor: Any) -> int:
    """How many of the joint graph's outputs the forward pass returns."""
    split = getattr(descriptor._aot_graph_capture, "maybe_subclass_meta", None)  # a DTensor comes as shard and mesh
    meta = descriptor._aot_state.fw_metadata if split is None else split.fw_metadata
    return int(meta.num_mutated_inp_runtime_indices + meta.num_outputs + meta.num_intermediate_bases)


def compile_joint(
    descriptor: Any,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    forward: Any,
    backward: Any,
) -> Callable[..., Any]:
    """A function of (parameters, buffers, arguments) that runs the two graphs under AOTAutograd's own runtime."""
    # compiling empties the metadata that it is given, and one capture may be compiled for several plans
    descriptor, state = copy.copy(descriptor), copy.copy(descriptor._aot_state)
    state.fw_metadata = _kept_metadata(state.fw_metadata)
    state.fw_metadata.bw_donated_idxs = []  # None would be taken for some, and retain_graph=True be refused
    symbolic: dict[int, Any] = {}
    state.fw_metadata.dynamic_saved_tensors_idxs = symbolic  # another plan saves other tensors
    descriptor._aot_state = state
    descriptor._aot_graph_capture = copy.copy(descriptor._aot_graph_capture)
    inner = getattr(descriptor._aot_graph_capture, "maybe_subclass_meta", None)
    if inner is not None:
        inner = descriptor._aot_graph_capture.maybe_subclass_meta = copy.copy(inner)
        inner.fw_metadata = _kept_metadata(inner.fw_metadata)
        inner.grad_input_metas = _kept_subclasses(inner.grad_input_metas)
    with functorch_config.patch(donated_buffer=False):
        function: Callable[..., Any] = aot_compile_joint_with_descriptors(
            descriptor, partition_fn=partition, fw_compiler=forward, bw_compiler=backward
        )
    symbolic.clear()  # each call would mark the sizes of these tensors for Dynamo, which does not see them
    return function


def _kept_metadata(metadata: Any) -> Any:
    """A copy of AOTAutograd's metadata that may be emptied, those of tensor subclasses such as DTensor included."""
    metadata = copy.copy(metadata)
    for name in ("subclass_inp_meta", "subclass_fw_graph_out_meta", "subclass_tangent_meta"):
        setattr(metadata, name, _kept_subclasses(getattr(metadata, name)))
    return metadata


def _kept_subclasses(found: Sequence[Any] | None) -> list[Any] | None:
    return None if found is None else [copy.copy(each) for each in found]


def split_by_ddp() -> bool:
    """Whether Dynamo compiles a graph that DistributedDataParallel's optimizer has cut at its buckets."""
    context = TracingContext.try_get()
    return getattr(context, "ddp_optimizer_ctx", None) is not None


def is_skipped(function: Callable[..., Any]) -> bool:
    """Whether Dynamo compiles no frame of a function's own, as of torch's; called from another it is traced into."""
    return bool(trace_rules.check(function))


def draws_numbers() -> bool:
    """Whether the code that Dynamo compiles draws numbers of Python's, which it does before the graph runs."""
    with contextlib.suppress(AttributeError, IndexError):  # in another thread than Dynamo's
        return bool(InstructionTranslator.current_tx().output.random_calls)
    return False


def frame_number() -> int | None:
    """Which frame of the user's code Dynamo is compiling: parts of a split model have different ones."""
    compiling = CompileContext.current_compile_id()
    return None if compiling is None else compiling.frame_id


@contextlib.contextmanager
def dynamo_settings(ignored: frozenset[Callable[..., Any]], most_graphs: int) -> Iterator[None]:
    """Dynamo's settings for a module that is planned: none of what the defaults leave unseen or give up silently.

    Hooks on parts are guarded, DistributedDataParallel's buckets cut no graph, logging of `ignored` functions breaks
    none, an integer of a module, such as a counter, is no constant once it has changed, an exception of the backend is
    raised, and `torch.autograd.grad` inside the code is traced.
    """
    more: dict[str, Any] = {"trace_autograd_ops": True} if hasattr(_dynamo_config, "trace_autograd_ops") else {}
    with _dynamo_config.patch(
        skip_nnmodule_hook_guards=False,
        optimize_ddp=False,
        suppress_errors=False,
        allow_unspec_int_on_nn_module=True,
        **more,
        recompile_limit=most_graphs,
        accumulated_recompile_limit=max(most_graphs, _dynamo_config.accumulated_recompile_limit),
        ignore_logging_functions=_dynamo_config.ignore_logging_functions | ignored,
    ):
        yield


@contextlib.contextmanager
def only_real_tensors() -> Iterator[None]:
    """No fake mode nor any other dispatch mode inside, and no dispatch through Python.

    AOTAutograd traces with Python's dispatcher on, which keeps the interpreter's lock through every kernel: a
    collective of gloo then waits for its workers, and they, to free a tensor, for that lock.
    """
    with _disable_current_modes(), no_python_dispatcher():
        yield


@contextlib.contextmanager
def traced_alone() -> Iterator[None]:
    """For a trace of a graph of Dynamo's outside of Dynamo: of its own, and without the modes of torch functions that
    run around the call, which Dynamo has traced into the graph already."""
    with _tracing(None), torch.DisableTorchFunction(), functorch_config.patch(donated_buffer=False):
        yield


def has_tangents(graph: fx.Graph) -> bool:
    """Whether a graph has a backward pass."""
    return any(is_tangent(node) for node in graph.nodes if node.op == "placeholder")


def is_tangent(placeholder: fx.Node) -> bool:
    """Whether a joint graph's input is the gradient of one of its outputs, or a part of one that is a tensor subclass.

    AOTAutograd's descriptor says so; of a graph that has none its name does.
    """
    described = placeholder.meta.get("desc")
    if described is None:
        return str(placeholder.target).startswith("tangents")
    while hasattr(described, "base"):
        described = described.base
    return bool(described.is_tangent())


def descriptors(graph: fx.Graph) -> list[Any]:
    """What AOTAutograd says of each result of a graph; empty where it says nothing."""
    return list(graph.output_node().meta.get("desc") or ())


def set_descriptors(graph: fx.Graph, described: Sequence[Any]) -> None:
    """Say of each result of a graph what AOTAutograd's runtime is to know of it, or None."""
    graph.output_node().meta["desc"] = list(described)


def updated_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """The inputs that the step overwrites, by the position of the result that is their new value."""
    inputs = {n.meta["desc"]: n for n in graph.nodes if n.op == "placeholder" and "desc" in n.meta}
    sources = (getattr(descriptor, "mutated_input", None) for descriptor in descriptors(graph))
    return {position: inputs[source] for position, source in enumerate(sources) if source is not None}


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward made this node, or whose forward made what this node differentiates."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"\['?([^'\]]*)'?\]", r".\1", str(list(stack.values())[-1][0]))
    return re.sub(r"^L\.\w+\.?", "", path.replace("_modules.", ""))


def own_checkpoint(node: fx.Node) -> int | None:
    """Which region that the module's own code checkpoints a node of a joint graph is in; None: it is in none."""
    return node.meta.get("ac_graph_id")


def own_checkpoints(graph: fx.Graph) -> int:
    """How many regions of a joint graph the module's own code checkpoints."""
    return len({own_checkpoint(node) for node in graph.nodes} - {None})


def inside_transform() -> bool:
    """Whether a transform of `torch.func` is around: Dynamo would run the code as it is, now and ever after."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def raised_by_backend(error: Exception) -> Exception:
    """What a backend raised where Dynamo says that one failed; any other error is itself."""
    inner = getattr(error, "inner_exception", None) if isinstance(error, TorchDynamoException) else None
    return inner if isinstance(inner, Exception) else error


def is_no_graph(error: Exception) -> bool:
    """Whether Dynamo says that a function is no single graph."""
    return isinstance(error, TorchDynamoException)


def is_internal(error: Exception) -> bool:
    """Whether Dynamo itself has failed, of something that it did not foresee."""
    return isinstance(error, InternalTorchDynamoError)


def saved_unchecked(node: fx.Node) -> bool:
    """Whether AOTAutograd saves a value without a look at its version: it may be overwritten before it is read."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))


MODULE_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Notes of the modules whose forward made a node, or what it differentiates; Dynamo's nodes have the first."""


_PACKAGES = frozenset({"torch", "_operator", "operator", "builtins", "math"})


def of_torch_or_python(target: Any) -> bool:
    """Whether a function that Dynamo leaves in a graph is torch's or Python's: a version says what it does."""
    return str(getattr(target, "__module__", None) or "torch").partition(".")[0] in _PACKAGES


EXAMPLE = "example_value"
"""The note that has the fake value of a node of Dynamo's; that of a node of a joint graph is "val"."""


def example_of(node: fx.Node) -> Any:
    """The fake value of a node of Dynamo's."""
    return node.meta.get("example_value")


def set_examples(module: fx.GraphModule, examples: Mapping[str, Any]) -> None:
    """Say of the inputs of a part of a graph of Dynamo's what they are, by the names of its nodes."""
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = examples[str(node.target)]


def description(node: fx.Node) -> Any:
    """What AOTAutograd says of an input; None where it says nothing."""
    return node.meta.get("desc")


def input_place(node: fx.Node) -> int | None:
    """Which input of Dynamo's graph an input of a joint graph is; None for a tensor that the graph itself holds."""
    return getattr(node.meta.get("desc"), "idx", None)


def with_graph(like: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A graph of torch.compile's with a copy of its graph in that one's place: what it says of itself, and of where its
    inputs come from, which copying its nodes does not."""
    made = fx.GraphModule(like, graph)
    made.meta = dict(like.meta)
    pairs = zip(*(each.graph.find_nodes(op="placeholder") for each in (like, made)), strict=True)
    for its, mine in ((like, made), *pairs):  # Dynamo writes it on the objects, where torch.fx has nothing of its own
        vars(mine).update({key: value for key, value in vars(its).items() if key not in vars(mine)})
    return made


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd says that the backward pass made a node."""
    return node.meta.get("partitioner_tag") == "is_backward"


def sequence_number(node: fx.Node) -> int | None:
    """What a node of the backward pass has in common with the one that it differentiates."""
    number: int | None = node.meta.get("seq_nr")
    return number


def traced_from(node: fx.Node) -> str:
    """The name of Dynamo's node for which AOTAutograd's forward pass made this one; empty where it does not say."""
    sources = node.meta.get("from_node")
    return str(sources[0].name) if sources else ""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds others, as a DTensor does, by more than its own metadata says."""
    return hasattr(type(tensor), "__tensor_flatten__")


def fake_like(tensor: Any, holder: torch.Tensor | None) -> torch.Tensor:
    """A fake tensor like another one, in the storage that a third one has; None: in a storage of its own.

    It is to be called under `only_real_tensors`.

    Raises:
        NotImplementedError: its sizes are symbols, and it does not fill a storage of its own, or has another dtype.
    """
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if any(isinstance(number, torch.SymInt) for number in (*shape, *strides, offset)):
        if (holder is None and type(offset) is int and offset == 0) or (
            holder is not None and holder.dtype == tensor.dtype
        ):
            with tensor.fake_mode, torch.no_grad():
                if holder is None:
                    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
                return holder.as_strided(shape, strides, offset)
        raise NotImplementedError("a tensor of symbolic sizes in a part of a storage")
    storage = meta_storage(tensor.untyped_storage().nbytes()) if holder is None else holder.untyped_storage()
    made = fake_in(tensor.fake_mode, storage, tensor, shape, strides, offset)
    return made.requires_grad_(tensor.requires_grad)


def meta_storage(size: int) -> Any:
    """A storage of so many bytes without memory, in which fake tensors lie."""
    memory_of: Any = torch.UntypedStorage
    return memory_of(size, device="meta")


def fake_in(mode: Any, storage: Any, like: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """A fake tensor in a storage without memory, of the dtype and on the device of another one.

    It is to be called under `only_real_tensors`.
    """
    made = torch.empty(0, dtype=like.dtype, device="meta").set_(storage, offset, shape, strides)
    return FakeTensor(mode, made, like.device)
