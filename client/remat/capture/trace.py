"""From a module and example inputs to the joint forward-backward graph of one training step."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx, nn

from .. import _compat, generators
from ..distributed.refused import refuse_sharded
from ..errors import CaptureError
from .dataflow import tensors

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Capture:
    """One captured training step.

    Attributes:
        joint: forward and backward as one ATen graph, functionalized; metadata are fake tensors.
        forward_outputs: how many of its outputs the forward pass returns.
        params, buffers: the names of the tensors that lead its inputs, in order.
        constants: tensors that the module's code closes over and that are neither, by name.
        descriptor: what AOTAutograd needs to make a function of the planned graphs.
    """

    joint: fx.GraphModule
    forward_outputs: int
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    descriptor: Any = field(repr=False)


def capture(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
    """Capture the joint graph of `module(*args, **kwargs)` ahead of time, without running it.

    The tensors may be fake: nothing is allocated. Python state that the code reads (flags, shapes, train mode) is baked
    in; whoever runs the graph checks it.

    Raises:
        CaptureError: the module cannot be captured as one graph; the message says why.
    """
    if not torch.is_grad_enabled():
        raise CaptureError("gradients are disabled: capture a training step outside of torch.no_grad()")
    refuse_sharded(module)
    _refuse_not_strided(module, args, kwargs)
    try:
        with generators.kept(), contextlib.ExitStack() as stack:
            graph = _compat.strict_graph(module, args, kwargs, _logging_functions(module))
            descriptor = _compat.export_joint(stack, graph, args, kwargs)
    except _compat.SideEffects as error:
        raise CaptureError(
            f"{type(module).__name__} changes Python state when it is called, which a captured step would not repeat: "
            f"{error}; update buffers in place (self.count.add_(1), not self.count += 1)"
        ) from error
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be captured as one graph: {_advice(module, error)}{_first_line(error)}",
            stages_may_do=True,
        ) from error
    joint = _compat.joint_graph(descriptor)
    refuse(joint)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    tensors = dict(graph.named_parameters(remove_duplicate=False)) | dict(graph.named_buffers(remove_duplicate=False))
    params, buffers = _compat.state_names(descriptor)
    return Capture(
        joint=joint,
        forward_outputs=_compat.forward_outputs(descriptor),
        params=params,
        buffers=buffers,
        constants={name: tensors[name] for name in (*params, *buffers) if name not in known},
        descriptor=descriptor,
    )


def refuse(joint: fx.GraphModule) -> None:
    """Refuse, by name, what the lowering cannot run exactly.

    Raises:
        CaptureError: it depends on data, mutates its inputs, or is not an operator.
    """
    outputs = joint.graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(f"{node.name} depends on the data or on a dynamic shape: {node.target}")
        if node.op == "call_function" and isinstance(node.target, _compat.HigherOrderOperator):
            inside = next((a for a in node.args if isinstance(a, _compat.OpOverload)), None)
            what = f"{node.target}" if inside is None else f"{node.target} around {inside}"
            raise CaptureError(f"{node.name} is the higher-order operator {what}, which cannot be planned yet")
        for tensor in tensors(value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{node.name} ({node.target}) makes a {_layout(tensor)} tensor, whose memory cannot be planned: "
                    "use dense gradients (sparse=False in nn.Embedding), or plan the parts around it"
                )
        if (
            node.op == "call_function"
            and isinstance(node.target, _compat.OpOverload)
            and _compat.is_mutable(node.target)
        ):
            raise CaptureError(f"{node.name} mutates its inputs: {node.target}")
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


def _logging_functions(module: nn.Module) -> frozenset[Callable[..., Any]]:
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


def _advice(module: nn.Module, error: Exception) -> str:
    """What to do about the commonest reason, a transformers model that returns its key–value cache."""
    if "Cache" in str(error) and getattr(getattr(module, "config", None), "use_cache", False):
        return "set model.config.use_cache = False, since training needs no key–value cache. "
    return ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}" if lines else type(error).__name__


def untraced(forward: F) -> F:
    """A forward pass by a plan, which `torch.compile` leaves as it is: what is around it is compiled alone."""
    reason = (
        "remat runs this module by its plan, which Dynamo cannot trace; for a plan under Inductor's kernels give the "
        "plain model to torch.compile(model, backend=remat.backend(budget, inner='inductor'))"
    )
    left: F = torch.compiler.disable(forward, reason=reason)  # type: ignore[no-untyped-call]
    return left
