"""Operators: the classes of what a graph calls, their schemas, and ATen's own underscored ones."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .versions import lacking, require

require(
    lacking(
        (),
        (
            (torch.ops.aten.add.Tensor, "_op"),
            (torch.ops.aten.add.Tensor, "redispatch"),
        ),
    )
)

READ_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
"""What `item` and `if tensor:` call."""
TO_COPY: Any = torch.ops.aten._to_copy.default
BATCH_NORM: Any = torch.ops.aten._native_batch_norm_legit_functional.default
"""What AOTAutograd makes of batch normalization that updates its running statistics."""
BATCH_NORM_WITHOUT_STATISTICS: Any = torch.ops.aten._native_batch_norm_legit.no_stats

RESULTS_ON_HOST: Mapping[Any, tuple[int, ...]] = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default: (2, 3),
    torch.ops.aten._efficient_attention_forward.default: (2, 3),
}
"""Results that lie on the host whatever the device, by their positions; a fake tensor says that they lie on the device.

They are seed and offset of the dropout. The backward kernels read them on the host
(aten/src/ATen/native/transformers/cuda/attention_backward.cu), so that ones on the device end the process.
"""


_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem"})


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The negative of a tensor, as a bit of a view of it."""
    view: torch.Tensor = torch.ops.aten._neg_view.default(tensor)
    return view


def is_collective(target: Any) -> bool:
    """Whether an operator speaks with other processes, or waits for them."""
    return isinstance(target, OpOverload) and full_name(target).split("::")[0] in _COLLECTIVES


GROUP_NAMES = ("group", "group_name", "process_group")
"""What a collective's operator calls the group that it speaks in."""


def process_group(node: fx.Node) -> torch.distributed.ProcessGroup | None:
    """The process group in which a node's collective speaks; None where it names none, such as a wait."""
    if not isinstance(node.target, OpOverload):
        return None
    for name, given in zip(parameter_names(node.target), node.args, strict=False):
        if name in GROUP_NAMES:
            value: Any = given.meta.get("val") if isinstance(given, fx.Node) else given
            value = getattr(value, "real_obj", value)
            if not isinstance(value, str):
                group: torch.distributed.ProcessGroup | None = value
                return group
            resolved: Any = torch.distributed.distributed_c10d
            return resolved._resolve_process_group(value) if torch.distributed.is_initialized() else None
    return None


_FUNCTIONAL = frozenset({"aten", "prims", "prim", "inductor", "quantized", "quantized_decomposed", "torchvision"})
"""The namespaces of torch's own operators, whose schemas say what they write and which of them draw numbers."""


_FUNCTIONAL_ELSEWHERE = frozenset({"transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"})
"""Products with groups of rows, as transformers registers them where torch's own kernel does not run."""


def is_known(target: Any) -> bool:
    """Whether what an operator does is known: it is one of torch's own, or one of few others."""
    if not isinstance(target, OpOverload):
        return False
    name = full_name(target)
    return name.split("::")[0] in _FUNCTIONAL | _COLLECTIVES or name in _FUNCTIONAL_ELSEWHERE


def full_name(target: OpOverload) -> str:
    """An operator's name with its namespace, without the overload, as "namespace::name"."""
    return str(target.name()).partition(".")[0]  # type: ignore[no-untyped-call]


def raw_call(target: Any) -> Callable[..., Any]:
    """An operator's own entry, without the Python wrapper around it."""
    return target._op if isinstance(target, OpOverload) else target


def taking_generator(target: OpOverload) -> OpOverload | None:
    """The overload of a random operator that takes a generator; None where there is none, as for `native_dropout`."""
    if "generator" in parameter_names(target):
        return target
    packet, name = target.overloadpacket, f"{target.name().partition('.')[2]}_generator".lstrip("_")  # type: ignore[no-untyped-call]
    return getattr(packet, name) if name in packet.overloads() else None


_BACKENDS = {name.lower(): key for name, key in torch.DispatchKey.__members__.items()}
"""What an operator's kernels are found by, by kind of device; one that is named elsewhere is PrivateUse1."""


def run_watched(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], mode: TorchDispatchMode) -> Any:
    """Run an operator inside its own dispatch mode, which then sees the operators that its kernel calls."""
    device = next((t.device for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), torch.device("cpu"))
    key = _BACKENDS.get(device.type, torch.DispatchKey.PrivateUse1)
    with mode:
        return target.redispatch(torch.DispatchKeySet(key), *args, **kwargs)


def operator_name(target: OpOverload) -> str:
    """An operator's bare name, without namespace and overload."""
    return full_name(target).split("::")[-1]


@functools.cache
def _schema(target: OpOverload) -> Any:
    """What an operator's registration says of its arguments."""
    _, (schema,) = get_signature_for_torch_op(target, return_schemas=True)  # type: ignore[misc]
    return schema


def parameter_names(target: OpOverload) -> tuple[str, ...]:
    """The names of what an operator takes, in order."""
    return tuple(argument.name for argument in _schema(target).arguments)


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call that an operator writes to; none of what is no operator."""
    if not isinstance(target, OpOverload):
        return []
    written = [a.alias_info is not None and a.alias_info.is_write for a in _schema(target).arguments]
    found = [value for value, writes in zip(args, written, strict=False) if writes]
    names = zip(parameter_names(target), written, strict=True)
    return found + [kwargs[name] for name, writes in names if writes and name in kwargs]


_REGION = torch.ops.higher_order.invoke_subgraph

_RUN_WHOLE = frozenset(
    {
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "map_impl",
        "scan",
        "triton_kernel_wrapper_functional",
        "while_loop",
        "while_loop_stack_output",
    }
)
"""Higher-order operators that a step runs as one kernel each, by their own entry: they write to nothing they take."""

_RUN_ONCE = frozenset(
    {"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional", "while_loop"}
)
"""Of these, those around what may do anything, and a loop, which on made-up numbers might not end."""


def is_region(node: fx.Node) -> bool:
    """Whether a node calls a part of the code that `torch.compiler.nested_compile_region` marks."""
    return node.op == "call_function" and node.target is _REGION


def runs_whole(target: Any) -> bool:
    """Whether a higher-order operator can be run as one kernel."""
    return isinstance(target, HigherOrderOperator) and str(target) in _RUN_WHOLE


def is_functional_region(node: fx.Node) -> bool:
    """Whether a higher-order operator may run again, on made-up numbers, too: no operator in it draws any, writes, or
    may do anything."""
    if not runs_whole(node.target) or str(node.target) in _RUN_ONCE:
        return False
    root = node.graph.owning_module
    parts = [getattr(root, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    inside = [n for p in parts if isinstance(p, fx.GraphModule) for n in p.graph.nodes if n.op == "call_function"]
    return all(map(_is_functional, inside))


def _is_functional(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return is_functional_region(node)
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    drawing = torch.Tag.nondeterministic_seeded in node.target.tags
    return is_known(node.target) and not drawing and not is_mutable(node.target) and not is_collective(node.target)


def is_mutable(target: OpOverload) -> bool:
    """Whether an operator writes to what it takes."""
    return bool(_schema(target).is_mutable)
