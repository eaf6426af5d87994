"""Tracing: Dynamo's and AOTAutograd's entries, their fake tensors, and what they leave on the graphs that they make."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.output_graph as _output_graph
import torch._dynamo.variables.user_defined as _user_defined
import torch._functorch.config as _functorch_config
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import get_traced_fn
from torch._dynamo.exc import unimplemented
from torch._dynamo.functional_export import (
    DynamoBytecodeFlatten,
    DynamoBytecodeUnflatten,
    dynamo_graph_capture_for_export,
)
from torch._dynamo.source import TempLocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd.descriptors import (
    SubclassGetAttrAOTInput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
    SyntheticBaseAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
from torch._library import simple_registry
from torch._library.effects import EffectHolder
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import _side_effectful_functions
from torch.utils._python_dispatch import _disable_current_modes

from .module_state import CALL_HOOKS, hooks_set_aside
from .versions import lacking, require

__all__ = [
    "CHECKS",
    "FakeTensor",
    "FakeTensorMode",
    "SideEffects",
    "aot_backend",
    "compile_joint",
    "description_of",
    "descriptors",
    "detect_fake_mode",
    "dynamo_settings",
    "export_joint",
    "forward_outputs",
    "frame_number",
    "has_merged_inputs",
    "has_tangents",
    "is_tangent",
    "joint_graph",
    "module_path",
    "no_function_modes",
    "numbers_kept",
    "only_real_tensors",
    "own_checkpoint",
    "own_checkpoints",
    "raised_by_the_code",
    "saved_unchecked",
    "set_descriptors",
    "split_by_ddp",
    "state_names",
    "strict_graph",
    "traced_alone",
    "updated_inputs",
]

require(
    lacking(
        (
            (aot_export_joint_with_descriptors, ("stack", "mod", "args", "kwargs")),
            (aot_compile_joint_with_descriptors, ("jd", "partition_fn", "fw_compiler", "bw_compiler")),
            (unimplemented, ("gb_type", "context")),
        ),
        (
            (_dynamo_config, "ignore_logging_functions"),
            (_dynamo_config, "automatic_dynamic_shapes"),
            (_functorch_config, "donated_buffer"),
            (_output_graph, "warnings"),
            (_output_graph, "unimplemented"),
            (_user_defined, "call_random_fn"),
            (InstructionTranslator, "current_tx"),
            (EffectHolder, "register"),
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
    holders = [simple_registry.singleton.find(str(check._name)).effect for check in CHECKS]
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


class SideEffects(Exception):
    """The module's code changes Python state that lives on after the call; a graph would not.

    Attributes:
        stack: where it first does so, as text; empty where Dynamo did not note it.
    """

    def __init__(self, sources: Sequence[str], stack: str) -> None:
        named = [re.sub(r"\._modules\['(.+?)'\]", r".\1", source).replace("L['self']", "self") for source in sources]
        super().__init__(", ".join(named))
        self.stack = stack


def strict_graph(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], ignored: frozenset[Callable[..., Any]]
) -> torch.nn.Module:
    """A module, or a method of one, as one graph by Dynamo; `ignored` are logging functions.

    The graph has the module's parameters and buffers under their own names, and its submodules.

    Every size is captured as itself. Left to its own settings Dynamo takes a size that has changed for a symbol, which
    takes it twice as long, and the joint graph is of one size all the same.
    """
    settings: dict[str, Any] = {"ignore_logging_functions": set(ignored), "automatic_dynamic_shapes": False}
    settings["skip_nnmodule_hook_guards"] = False
    told = _Told()
    with told.listening(), _drawing_nothing(), _dynamo_config.patch(**settings):
        graph: Any = dynamo_graph_capture_for_export(call)(*args, **kwargs)
    made = graph._dynamo_bytecode_flatten.out
    if any(name.startswith("__gen_rand_values") for name in made.graph_capture_output.bytecode.co_names):
        graph._dynamo_bytecode_flatten.__class__, graph._dynamo_bytecode_unflatten.__class__ = _Flatten, _Unflatten
    # left among the globals of the caller's code, it would hold the module and this call's arguments for good
    made.graph_capture_output.f_globals.pop(made.backend_input.backend_id, None)
    own = _keywords_of(call)
    harmful = {s: stack for s, stack in told.side_effects.items() if s != own and not _harmless(s)}
    if harmful:
        raise SideEffects(list(harmful), next(filter(None, harmful.values()), ""))
    graph.__dict__.pop("forward", None)  # an instance's own, which is traced
    if not isinstance(call, torch.nn.Module):
        for name in CALL_HOOKS:  # they run around a call of the module
            getattr(graph, name).clear()
        graph._wrapped_call.cls_call = None
    return graph  # type: ignore[no-any-return]


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """Python's `random` is as before afterwards. For as short as possible: other threads draw from it, too."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


class _Flatten(DynamoBytecodeFlatten):
    """From a call's arguments to the graph's inputs, for which it draws the numbers of Python's that the code draws."""

    def __call__(self, *args: Any) -> Any:
        with numbers_kept():
            return super().__call__(*args)


class _Unflatten(DynamoBytecodeUnflatten):
    """From the graph's results to what the call returns; it draws those numbers again."""

    def __call__(self, *args: Any) -> Any:
        with numbers_kept():
            return super().__call__(*args)


@contextlib.contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Inside, the numbers of Python's `random` that Dynamo draws for examples are put back, each at once."""
    before = _user_defined.call_random_fn

    def put_back(*args: Any, **kwargs: Any) -> Any:
        with numbers_kept():
            return before(*args, **kwargs)

    _user_defined.call_random_fn = put_back
    try:
        yield
    finally:
        _user_defined.call_random_fn = before


class _Told:
    """Stands for what Dynamo speaks by: it keeps what is said of side effects, and names a line where none is named.

    It takes the place of the module `warnings` and of `unimplemented` where Dynamo looks at what a graph returns.

    `warnings.catch_warnings` is not enough: whoever leaves another one meanwhile, in another thread or in a suspended
    function that the garbage collector ends, puts back the state from before, and what is said after that is lost.
    """

    def __init__(self) -> None:
        self.side_effects: dict[str, str] = {}  # what is changed → the stack of the first change, or ""

    def warn(self, message: str, *args: Any, **kwargs: Any) -> None:
        if "side effects happened" in message:
            stacks = InstructionTranslator.current_tx().output.side_effects.mutation_user_stacks
            named = [(v.source, v) for v in stacks if v.source and not isinstance(v.source, TempLocalSource)]
            first = {source.name: "".join(stacks[var][0].format()) for source, var in named}
            for source in ast.literal_eval(message[message.index("[") :]):
                self.side_effects[source] = first.get(source, "")
        else:
            warnings.warn(message, *args, **{"stacklevel": 2, **kwargs})

    @staticmethod
    def unimplemented(*, gb_type: str, context: str, **said: Any) -> NoReturn:
        """Refuse what the graph returns for a `requires_grad_()` with the line of the first one."""
        if "requires_grad_()" in gb_type:
            nodes = InstructionTranslator.current_tx().output.graph.nodes
            context += "\n" + next((n.stack_trace for n in nodes if n.target == "requires_grad_" and n.stack_trace), "")
        unimplemented(gb_type=gb_type, context=context, **said)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        speaker: Any = _output_graph
        before = speaker.warnings, speaker.unimplemented
        speaker.warnings, speaker.unimplemented = self, self.unimplemented
        try:
            yield
        finally:
            speaker.warnings, speaker.unimplemented = before


def _keywords_of(call: Callable[..., Any]) -> str:
    """The source of the dictionary that a function's `**kwargs` are: one of its own for each call; empty without."""
    code = get_traced_fn(call)[0].__code__
    position = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return f"L['{code.co_varnames[position]}']" if code.co_flags & inspect.CO_VARKEYWORDS else ""


def _harmless(source: str) -> bool:
    """State that the call itself puts back: transformers' collector of hidden states."""
    return "__import_transformers_dot_utils_dot_output_capturing" in source


def export_joint(stack: contextlib.ExitStack, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The joint forward-backward graph with descriptors; `stack` holds the tracing contexts."""
    with hooks_set_aside(), checks_as_operators():  # hooks are in the graph
        return aot_export_joint_with_descriptors(stack, module, tuple(args), dict(kwargs))


def joint_graph(descriptor: Any) -> fx.GraphModule:
    """The graph of an exported joint."""
    return descriptor.graph_module  # type: ignore[no-any-return]


def state_names(descriptor: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the parameters and of the buffers that an exported joint takes, each in their order."""
    return tuple(descriptor.params_spec), tuple(descriptor.buffers_spec)


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
    descriptor._aot_state = state
    descriptor._aot_graph_capture = copy.copy(descriptor._aot_graph_capture)
    inner = getattr(descriptor._aot_graph_capture, "maybe_subclass_meta", None)
    if inner is not None:
        inner = descriptor._aot_graph_capture.maybe_subclass_meta = copy.copy(inner)
        inner.fw_metadata = _kept_metadata(inner.fw_metadata)
        inner.grad_input_metas = _kept_subclasses(inner.grad_input_metas)
    with _functorch_config.patch(donated_buffer=False):
        return aot_compile_joint_with_descriptors(
            descriptor, partition_fn=partition, fw_compiler=forward, bw_compiler=backward
        )


def _kept_metadata(metadata: Any) -> Any:
    """A copy of AOTAutograd's metadata that may be emptied, those of tensor subclasses such as DTensor included."""
    metadata = copy.copy(metadata)
    for name in ("subclass_inp_meta", "subclass_fw_graph_out_meta", "subclass_tangent_meta"):
        setattr(metadata, name, _kept_subclasses(getattr(metadata, name)))
    return metadata


def _kept_subclasses(found: Sequence[Any] | None) -> list[Any] | None:
    return None if found is None else [copy.copy(each) for each in found]


def aot_backend(partition: Callable[..., Any], forward: Any, backward: Any) -> Callable[..., Any]:
    """A backend for torch.compile that partitions with `partition` and runs the two graphs as these make them."""
    made = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)

    def run(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with _functorch_config.patch(donated_buffer=False), checks_as_operators():
            return made(module, example_inputs)

    return run


def no_function_modes() -> Any:
    """No function mode inside: a graph of Dynamo's has what the caller's modes did, and traced again has it once."""
    return torch._C.DisableTorchFunction()


def split_by_ddp() -> bool:
    """Whether Dynamo compiles a graph that DistributedDataParallel's optimizer has cut at its buckets."""
    context = TracingContext.try_get()
    return getattr(context, "ddp_optimizer_ctx", None) is not None


def frame_number() -> int | None:
    """Which frame of the user's code Dynamo is compiling: parts of a split model have different ones."""
    compiling = CompileContext.current_compile_id()
    return None if compiling is None else compiling.frame_id


@contextlib.contextmanager
def dynamo_settings(ignored: frozenset[Callable[..., Any]], most_graphs: int) -> Iterator[None]:
    """Dynamo's settings for a module that is planned: none of what the defaults leave unseen or give up silently.

    Hooks on parts are guarded, DistributedDataParallel's buckets cut no graph, logging of `ignored` functions breaks
    none, an integer of a module, such as a counter, is no constant once it has changed, and an exception of the backend
    is raised.
    """
    with _dynamo_config.patch(
        skip_nnmodule_hook_guards=False,
        optimize_ddp=False,
        suppress_errors=False,
        allow_unspec_int_on_nn_module=True,
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
    with tracing(None), no_function_modes(), _functorch_config.patch(donated_buffer=False):
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
    while isinstance(described, SubclassGetAttrAOTInput | SubclassSizeAOTInput | SubclassStrideAOTInput):
        described = described.base
    return bool(described.is_tangent())


def descriptors(graph: fx.Graph) -> list[Any]:
    """What AOTAutograd says of each result of a graph; empty where it says nothing."""
    return list(graph.output_node().meta.get("desc") or ())


def description_of(node: fx.Node) -> str:
    """What AOTAutograd says of an input, or of all results, in words; "None" where it says nothing."""
    return repr(node.meta.get("desc"))


def set_descriptors(graph: fx.Graph, described: Sequence[Any]) -> None:
    """Say of each result of a graph what AOTAutograd's runtime is to know of it, or None."""
    graph.output_node().meta["desc"] = list(described)


def updated_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """The inputs that the step overwrites, by the position of the result that is their new value."""
    inputs = {n.meta["desc"]: n for n in graph.nodes if n.op == "placeholder" and "desc" in n.meta}
    sources = (getattr(descriptor, "mutated_input", None) for descriptor in descriptors(graph))
    return {position: inputs[source] for position, source in enumerate(sources) if source is not None}


def has_merged_inputs(graph: fx.Graph) -> bool:
    """Whether inputs that share memory, of which one is overwritten, have become one input, before all others."""
    described = (node.meta.get("desc") for node in graph.nodes if node.op == "placeholder")
    return any(isinstance(each, SyntheticBaseAOTInput | ViewBaseAOTInput) for each in described)


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


def raised_by_the_code(error: Exception) -> bool:
    """Whether Dynamo stopped where the traced code itself raises."""
    return str(error).startswith("Observed exception")


def saved_unchecked(node: fx.Node) -> bool:
    """Whether AOTAutograd saves a value without a look at its version: it may be overwritten before it is read."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))
