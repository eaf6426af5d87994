"""What cannot be captured or planned: refused by name, before it hangs or trains wrong, and what to do about it."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx, nn

from .. import _compat
from ..errors import CaptureError
from .dataflow import tensors
from .sizes import SYMBOLS

F = TypeVar("F", bound=Callable[..., Any])


def refuse(joint: fx.GraphModule) -> None:
    """Refuse, by name, what the lowering cannot run exactly.

    Raises:
        CaptureError: it depends on data, mutates its inputs, or is not an operator.
    """
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLS) and node.op == "placeholder":
            raise CaptureError(
                "torch.compile takes a size or a number of this call for a symbol, and a plan is for one size: call "
                "torch.compile(…, dynamic=False), which plans each size when it is first seen"
            )
        if isinstance(value, SYMBOLS):
            raise CaptureError(f"{node.name} depends on the data or on a dynamic shape: {node.target}{_place_of(node)}")
        higher = node.op == "call_function" and isinstance(node.target, _compat.HigherOrderOperator)
        if higher and not _compat.runs_whole(node.target):
            inside = next((a for a in node.args if isinstance(a, _compat.OpOverload)), None)
            what = f"{node.target}" if inside is None else f"{node.target} around {inside}"
            raise CaptureError(
                f"{node.name} is the higher-order operator {what}, which cannot be planned yet{_place_of(node)}"
            )
        for tensor in tensors(value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{node.name} ({node.target}) makes a {layout(tensor)} tensor, whose memory cannot be planned: "
                    f"use dense gradients (sparse=False in nn.Embedding), or plan the parts around it{_place_of(node)}"
                )
        if isinstance(node.target, _compat.OpOverload) and _compat.is_mutable(node.target):
            raise CaptureError(f"{node.name} mutates its inputs: {node.target}{_place_of(node)}")
        if node.op in ("call_module", "call_method"):
            raise CaptureError(f"{node.name} is a {node.op}, not an operator")


def layout(tensor: torch.Tensor) -> str:
    """How a tensor's numbers lie in memory, in a word: strided, sparse_coo, jagged."""
    return str(tensor.layout).removeprefix("torch.")


def logging_functions(module: nn.Module) -> frozenset[Callable[..., Any]]:
    """The methods of the loggers that the module's own source files hold: they would split the graph."""
    names = {base.__module__ for part in module.modules() for base in type(part).__mro__}
    found: set[Callable[..., Any]] = set()
    for name in sorted(names):
        if name.split(".")[0] in ("torch", "builtins"):
            continue
        for logger in vars(sys.modules.get(name, sys)).values():
            if isinstance(logger, logging.Logger):
                methods = ("debug", "info", "warning", "warning_once", "warning_advice", "error")
                found.update(getattr(logger, method) for method in methods if hasattr(logger, method))
    if hasattr(logging.Logger, "warning_once"):
        found.add(logging.Logger.warning_once)
    return frozenset(found)


def advice(module: nn.Module, error: Exception) -> str:
    """What to do about the commonest reasons: a key–value cache that is returned, a size that depends on the data."""
    if "Cache" in str(error) and getattr(getattr(module, "config", None), "use_cache", False):
        return "set model.config.use_cache = False, since training needs no key–value cache. "
    if _looping_experts(module):
        return (
            "its experts run in a loop over those that have tokens, which depends on the data: call "
            "model.set_experts_implementation('grouped_mm') or 'batched_mm', whose sizes are bounded by the tokens' "
            "choices, or train its layers as a chain (remat.optimize_chain), which takes any Python. "
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


def first_line(error: Exception) -> str:
    """The class of an error and the beginning of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = textwrap.shorten(" ".join(lines[:3]), 400, placeholder=" …")
    return f"{type(error).__name__}: {text}" if lines else type(error).__name__


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+\n\s*([^\n]*)')


def place(text: str) -> str:
    """The innermost line outside of torch in a stack that is part of a text, as a clause; empty without one."""
    found = _innermost(text)
    return "" if found is None else f" (at {found[0]}, line {found[1]}: {found[2]})"


def line_of(node: fx.Node) -> str:
    """The innermost line outside of torch that a kernel comes from, as `models/net.py:42`; empty if none is known."""
    found = _innermost(node.stack_trace or "")
    return "" if found is None else f"{found[0]}:{found[1]}"


def _innermost(text: str) -> tuple[str, str, str] | None:
    """File, with its folder, line and code of the innermost frame outside of torch, or of the innermost at all."""
    frames = _FRAME.findall(text)
    own = [f for f in frames if f"{os.sep}torch{os.sep}" not in f[0]] or frames
    if not own:
        return None
    path, line, code = own[-1]
    return os.sep.join(path.split(os.sep)[-2:]), line, code.strip()


def _place_of(node: fx.Node) -> str:
    return place(node.stack_trace or "")


def untraced(forward: F) -> F:
    """A forward pass by a plan, which `torch.compile` leaves as it is: what is around it is compiled alone."""
    reason = (
        "remat runs this module by its plan, which Dynamo cannot trace; for a plan under Inductor's kernels give the "
        "plain model to torch.compile(model, backend=remat.backend(budget, inner='inductor'))"
    )
    left: F = torch.compiler.disable(forward, reason=reason)  # type: ignore[no-untyped-call]
    return left


def refuse_sharded(module: nn.Module) -> None:
    """Refuse to capture a module whose parameters are not all whole when it is called.

    Raises:
        CaptureError: FSDP shards a part of it by itself, or the whole of it is called outside of FSDP's hooks.
    """
    unit = fsdp_module()
    wrapper = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, part in module.named_modules():
        if name and isinstance(part, (*unit, *wrapper)):
            raise CaptureError(
                f"FSDP shards {name} of this {_class_before(module)} as a unit of its own, so one plan of the whole is "
                "not supported: enable remat on an nn.ModuleList of the units, which share one budget, or make a chain"
            )
    if any(map(_compat.sharded_by_fsdp, module.modules())):
        name = next((name for name, p in module.named_parameters() if hasattr(p, "to_local")), "a parameter")
        raise CaptureError(
            f"{name} is sharded over ranks (DTensor) when this {type(module).__name__} is captured: use "
            "remat.enable on the unit that fully_shard gathers, which plans inside its call, and not remat.optimize"
        )
    refuse_flattened(module)


def refuse_flattened(module: nn.Module) -> None:
    """Refuse a module whose parameters the older FSDP has flattened.

    Raises:
        CaptureError: it has.
    """
    if any(map(_compat.flattened_by_fsdp, module.modules())):
        raise CaptureError(
            f"FullyShardedDataParallel has flattened the parameters of this {type(module).__name__}, which is not "
            "supported: use fully_shard (FSDP2) on each unit"
        )


def _class_before(module: nn.Module) -> str:
    """The name of a module's class before `fully_shard` gave it another one."""
    sharded = fsdp_module()
    return next(c.__name__ for c in type(module).__mro__ if not (sharded and issubclass(c, sharded)))


def refuse_split_by_ddp() -> None:
    """Refuse to plan a part of a step that DDP has cut under `torch.compile`.

    Raises:
        CaptureError: Dynamo compiles one bucket of several.
    """
    if _compat.split_by_ddp():
        raise CaptureError(
            "DistributedDataParallel under torch.compile cuts the step at its buckets and has each compiled alone, so "
            "no plan sees the whole: set torch._dynamo.config.optimize_ddp = False before the first step; compile each "
            "block with a backend and a budget of its own where communication has to overlap the backward pass"
        )


def refuse_searching_ddp() -> None:
    """Refuse to run stages by a plan where DDP looks for unused parameters in their graph.

    Raises:
        CaptureError: the surrounding DDP has find_unused_parameters=True, and would find every one of them unused.
    """
    ddp: Any = _compat.active_ddp()
    if ddp is not None and ddp.find_unused_parameters and not ddp.static_graph:
        raise CaptureError(
            "DistributedDataParallel(find_unused_parameters=True) is not supported around stages that run by a plan: "
            "their backward passes are nested, so DDP would take every parameter for an unused one; leave it out"
        )


def fsdp_module() -> tuple[type, ...]:
    """The class of what fully_shard has sharded, if there can be any."""
    return _class("torch.distributed.fsdp", "FSDPModule")


def _class(module: str, name: str) -> tuple[type, ...]:
    """A class, if its module has been imported: otherwise nothing is one of it."""
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()
