"""From a module and example inputs to the joint forward-backward graph of one training step."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx, nn

from .. import _compat
from .._compat.module_state import backward_hooks_of_all, forward_pre_hooks, has_backward_hooks
from ..distributed.refused import refuse_sharded
from ..errors import CaptureError
from .call import install_recorders
from .dataflow import tensors
from .expand import expand
from .kept import Captures
from .repeats import KEPT, runs, shortened

log = logging.getLogger("remat")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Capture:
    """One captured training step.

    Attributes:
        joint: forward and backward as one ATen graph, functionalized; metadata are fake tensors.
        forward_outputs: how many of its outputs the forward pass returns.
        params, buffers: the names of the tensors that lead its inputs, in order. What the module's code reads and is
            neither, such as a tensor that is an ordinary attribute, is among the buffers, by a name of `guards`.
        guards: what tracing read of Python's state, and those tensors.
        returns_numbers: whether a number is among what the module returns: an argument may be, unread.
        descriptor: what AOTAutograd needs to make a function of the planned graphs.
    """

    joint: fx.GraphModule
    forward_outputs: int
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    guards: _compat.CallGuards = field(repr=False)
    returns_numbers: bool
    descriptor: Any = field(repr=False)


def capture(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any] | None = None
) -> Capture:
    """Capture the joint graph of `module(*args, **kwargs)` ahead of time, without running it.

    Python state that the code reads (flags, numbers, train mode) is baked in; whoever runs the graph asks `guards`
    whether it is as it was.

    Args:
        run: what is called in place of the module: a method of its, such as its forward without the hooks around it.

    Raises:
        CaptureError: the module cannot be captured as one graph; the message says why.
    """
    if not torch.is_grad_enabled():
        raise CaptureError("gradients are disabled: capture a training step outside of torch.no_grad()")
    refuse_sharded(module)
    _refuse_not_strided(module, args, kwargs)
    _refuse_backward_hooks(module, whole=run is None or run is module)
    install_recorders(module, kwargs)
    run = module if run is None else run
    captures = Captures.here()
    with _no_collections():
        found = captures and captures.find(module, run, args, kwargs)
        if found:
            return _checked(*found, module)
        graph, guards, descriptor, seconds = _traced(module, args, kwargs, run)
        captured = _checked(descriptor, guards, module)
        if captures and seconds >= captures.from_s:
            captures.keep(graph, guards, descriptor, module, run, args, kwargs)
    return captured


def _traced(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]
) -> tuple[Any, _compat.CallGuards, Any, float]:
    """The graph, the guards and the descriptor of a call, and the CPU seconds that they took.

    Raises:
        CaptureError: as for `capture`.
    """
    began = time.process_time()
    try:
        with contextlib.ExitStack() as stack:
            graph = _compat.strict_graph(run, args, kwargs, logging_functions(module))
            guards = _compat.CallGuards.of_graph(graph, run, args, kwargs)
            descriptor = _joint(stack, graph, args, kwargs)
    except _compat.SideEffects as error:
        raise CaptureError(
            f"{type(module).__name__} changes Python state when it is called, which a captured step would not repeat: "
            f"{error}{_place(error.stack)}; {_way_out(module, str(error))}"
        ) from error
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be captured as one graph: {_advice(module, error)}{_first_line(error)}"
            f"{_place(str(error))}",
            stages_may_do=_TRANSFORMED not in str(error),
            raised_by_the_code=_compat.raised_by_the_code(error),
        ) from error
    return graph, guards, descriptor, time.process_time() - began


def _joint(stack: contextlib.ExitStack, graph: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The joint graph of Dynamo's, with its descriptors: of blocks that repeat, a few are traced and the others copied.

    Args:
        stack: holds the contexts of the trace.
    """
    counts = "in Dynamo's graph"
    try:
        found = runs(graph.graph)
        if found:
            counts = ", ".join(f"{len(run.blocks)} of {len(run.blocks[0])} ops" for run in found)
            with contextlib.ExitStack() as own:
                names = _compat.input_names(graph, args, kwargs)
                with _compat.replaced_graph(graph, shortened(graph.graph, found)):
                    descriptor = _compat.export_joint(own, graph, args, kwargs)
                expand(_compat.joint_graph(descriptor), found, names)
                stack.push(own.pop_all())
            log.info("of blocks that repeat (%s), %d each are traced and the others copied", counts, KEPT)
            return descriptor
    except Exception as error:  # the trace of the whole says what is wrong with the module itself
        log.info("blocks that repeat (%s) are traced one by one: %s", counts, _first_line(error))
    return _compat.export_joint(stack, graph, args, kwargs)


def _checked(descriptor: Any, guards: _compat.CallGuards, module: nn.Module) -> Capture:
    """A capture of which the lowering can run everything.

    Raises:
        CaptureError: there is something that it cannot.
    """
    joint = _compat.joint_graph(descriptor)
    refuse(joint)
    if _compat.has_merged_inputs(joint.graph):
        raise CaptureError(
            f"tensors that this {type(module).__name__} takes share memory, and the step overwrites one of them: "
            "pass a clone"
        )
    params, buffers = _compat.state_names(descriptor)
    forward_outputs = _compat.forward_outputs(descriptor)
    results: Any = joint.graph.output_node().args[0]
    return Capture(
        joint=joint,
        forward_outputs=forward_outputs,
        params=params,
        buffers=buffers,
        guards=guards,
        returns_numbers=any(isinstance(result, (int, float)) for result in results[:forward_outputs]),
        descriptor=descriptor,
    )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Python's collector of cycles rests: what a capture makes stays alive, and walking it again took time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def refuse(joint: fx.GraphModule) -> None:
    """Refuse, by name, what the lowering cannot run exactly.

    Raises:
        CaptureError: it depends on data, mutates its inputs, or is not an operator.
    """
    outputs = joint.graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and node.op == "placeholder":
            raise CaptureError(
                "torch.compile takes a size or a number of this call for a symbol, and a plan is for one size: call "
                "torch.compile(…, dynamic=False), which plans each size when it is first seen"
            )
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(f"{node.name} depends on the data or on a dynamic shape: {node.target}{_place_of(node)}")
        if node.op == "call_function" and isinstance(node.target, _compat.HigherOrderOperator):
            inside = next((a for a in node.args if isinstance(a, _compat.OpOverload)), None)
            what = f"{node.target}" if inside is None else f"{node.target} around {inside}"
            raise CaptureError(
                f"{node.name} is the higher-order operator {what}, which cannot be planned yet{_place_of(node)}"
            )
        for tensor in tensors(value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{node.name} ({node.target}) makes a {_layout(tensor)} tensor, whose memory cannot be planned: "
                    f"use dense gradients (sparse=False in nn.Embedding), or plan the parts around it{_place_of(node)}"
                )
        if (
            node.op == "call_function"
            and isinstance(node.target, _compat.OpOverload)
            and _compat.is_mutable(node.target)
        ):
            raise CaptureError(f"{node.name} mutates its inputs: {node.target}{_place_of(node)}")
        if node.op in ("call_module", "call_method"):
            raise CaptureError(f"{node.name} is a {node.op}, not an operator")


def _refuse_not_strided(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse sparse and jagged inputs, parameters and buffers by name.

    Raises:
        CaptureError: there is one.
    """
    given = [(f"argument {i}", value) for i, value in enumerate(args)] + list(kwargs.items())
    for name, value in (*given, *module.named_parameters(), *module.named_buffers()):
        for tensor in tensors(list(value.values()) if isinstance(value, Mapping) else value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{name} of this {type(module).__name__} is a {_layout(tensor)} tensor, whose memory cannot be "
                    "planned: pass dense (padded) tensors, or plan the part of the model that takes them"
                )


def _layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")


def _refuse_backward_hooks(module: nn.Module, whole: bool) -> None:
    """Hooks that modules run in the backward pass, between autograd's nodes of which a captured step has one.

    Raises:
        CaptureError: there is one on all modules, on a part of this one, or, if it is called as a `whole`, on itself.
    """
    what = "a captured step has no place for it: use a hook of a parameter or a tensor in its stead"
    if backward_hooks_of_all():
        raise CaptureError(f"there is a backward hook of all modules, and {what}")
    for name, part in module.named_modules():
        if has_backward_hooks(part) and (whole or part is not module):
            raise CaptureError(f"{name or type(module).__name__} has a backward hook, and {what}", stages_may_do=True)


def logging_functions(module: nn.Module) -> frozenset[Callable[..., Any]]:
    """The methods of the loggers that the module's own source files hold: they would split the graph."""
    names = {type(part).__module__ for part in module.modules()}
    names |= {base.__module__ for part in module.modules() for base in type(part).__mro__}
    found: set[Callable[..., Any]] = set()
    for name in sorted(names):
        if name.split(".")[0] in ("torch", "builtins"):
            continue
        for logger in vars(sys.modules.get(name, sys)).values():
            if isinstance(logger, logging.Logger):
                for method in ("debug", "info", "warning", "warning_once", "warning_advice", "error"):
                    if hasattr(logger, method):
                        found.add(getattr(logger, method))
    if hasattr(logging.Logger, "warning_once"):
        found.add(logging.Logger.warning_once)
    return frozenset(found)


def _way_out(module: nn.Module, changed: str) -> str:
    """What to do about Python state that a call changes: what changes it, where that is known, and who repeats it."""
    compiled = "torch.compile(model, backend=remat.backend(budget)), which repeats it in each step"
    if "_hooks" in changed:
        return f"a hook records there: remove it while training, or use {compiled}"
    parts = [part for part in module.modules() if _NORM.search(" ".join([type(part).__name__, *_pre_hooks(part)]))]
    if parts:
        return (
            "spectral norm and the older weight norm set a weight or a buffer in each call: use "
            f"torch.nn.utils.parametrizations.weight_norm, or {compiled}"
        )
    return f"update buffers in place (self.count.add_(1), not self.count += 1), or use {compiled}"


_NORM = re.compile(r"\b_?(Spectral|Weight)Norm\b")

_TRANSFORMED = "functorch tracing attempt"
"""What Dynamo says of a call inside a transform of `torch.func`."""


def _pre_hooks(part: nn.Module) -> list[str]:
    return [type(hook).__name__ for hook in forward_pre_hooks(part)]


def _advice(module: nn.Module, error: Exception) -> str:
    """What to do about the commonest reasons: a key–value cache that is returned, a size that depends on the data."""
    if "Cache" in str(error) and getattr(getattr(module, "config", None), "use_cache", False):
        return "set model.config.use_cache = False, since training needs no key–value cache. "
    if _looping_experts(module):
        return (
            "its experts run in a loop over those that have tokens, which depends on the data: call "
            "model.set_experts_implementation('grouped_mm') or 'batched_mm', whose sizes are bounded by the tokens' "
            "choices, or train its layers as a chain (remat.optimize_chain), which takes any Python. "
        )
    if _TRANSFORMED in str(error):
        return (
            "it is called inside a transform of torch.func (grad, vmap, …), and a plan has a backward pass of its own: "
            "transform the plain model (remat.disable), or plan parts that are outside of the transform. "
        )
    if "pytree-flattenable" in str(error):
        return (
            "an argument is of a class in which torch finds no tensors: pass a tensor, a tuple, a list or a dict, tell "
            "torch of a dataclass (torch.export.register_dataclass), or use torch.compile(model, "
            "backend=remat.backend(budget)). "
        )
    if "autograd.Function" in str(error) or "`out=`" in str(error):
        return (
            "it calls an autograd function that cannot be traced: plan the parts before it, which leaves it as it is, "
            "by remat.enable(model.PART), or by part= of a trainer's callback. "
        )
    if "DynamicOutputShape" in type(error).__name__:
        return (
            "the size of what an operator gives depends on the data, and memory is planned for one size: use "
            "torch.where, or a product with the mask, or torch.compile(model, backend=remat.backend(bytes), "
            "dynamic=False) without fullgraph, which plans the parts before and after it. "
        )
    return ""


def _looping_experts(module: nn.Module) -> bool:
    """Whether transformers runs a mixture of experts one after the other, each on the tokens that chose it."""
    experts = (part for part in module.modules() if type(part).__name__.endswith("Experts"))
    configs = (getattr(part, "config", None) for part in experts)
    return any(getattr(config, "_experts_implementation", None) == "eager" for config in configs)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{type(error).__name__}: {textwrap.shorten(' '.join(lines[:3]), 400, placeholder=' …')}"
        if lines
        else (type(error).__name__)
    )


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+\n\s*([^\n]*)')


def _place(text: str) -> str:
    """The innermost line outside of torch in a stack that is part of a text, as a clause; empty without one."""
    frames = _FRAME.findall(text)
    own = [f for f in frames if f"{os.sep}torch{os.sep}" not in f[0]] or frames
    if not own:
        return ""
    path, line, code = own[-1]
    return f" (at {os.sep.join(path.split(os.sep)[-2:])}, line {line}: {code.strip()})"


def _place_of(node: fx.Node) -> str:
    return _place(node.stack_trace or "")


def untraced(forward: F) -> F:
    """A forward pass by a plan, which `torch.compile` leaves as it is: what is around it is compiled alone."""
    reason = (
        "remat runs this module by its plan, which Dynamo cannot trace; for a plan under Inductor's kernels give the "
        "plain model to torch.compile(model, backend=remat.backend(budget, inner='inductor'))"
    )
    left: F = torch.compiler.disable(forward, reason=reason)  # type: ignore[no-untyped-call]
    return left
