"""What a kernel would cost on a device that is not here: a roofline by class of kernel, or a recorded measurement.

A kernel takes a launch and the longer of two times: its operations over the peak of its dtype, and the bytes that it
reads and writes over the bandwidth (Williams, Waterman and Patterson 2009), at what kernels of its class achieve.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import _compat
from .._compat import fake_cuda
from ..capture.dataflow import tensors
from ..device import NAMED
from ..planning.profiles import Profile, ProfileTable
from ..profiling.collectives import modelled_collective
from ..profiling.profile import Profiled, signature
from ..profiling.timing import bytes_of, operands, operations_of, rounded
from .devices import Target

_MATMUL = frozenset(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear", "dot", "mv"))
_REDUCTION = ("sum", "mean", "norm", "var", "max", "min", "loss", "any")
_GATHER = (
    "embedding",
    "index",
    "gather",
    "scatter",
    "sort",
    "topk",
    "take",
    "unique",
    "upsample",
    "grid_sample",
    "pool",
)

_UNSIZED = ("linalg", "cholesky", "triangular_solve", "geqrf", "ormqr", "fft", "cudnn", "sort", "topk", "unique")
"""Operators by libraries whose temporary memory follows from an algorithm that they choose on the device."""


class Priced(NamedTuple):
    """The prices of a step's kernels.

    Attributes:
        profiled: as a measurement would have them; `shared` counts the kinds of kernels that have a recorded cost.
        classes: the class of each kernel.
        words: where the prices are from, and what they leave out.
    """

    profiled: Profiled
    classes: Mapping[fx.Node, str]
    words: str


def price(kernels: Iterable[fx.Node], target: Target, table: ProfileTable | None = None, cp: int = 1) -> Priced:
    """The cost of each kernel on a device.

    Args:
        table: where costs measured on this kind of device are looked up, if the device says under which name.
        cp: so many ranks share a sequence: an attention runs once with each rank's keys and values, of which two shares
            are there, the one at work and the one that comes.
    """
    start = time.perf_counter()
    found: dict[str, Profile] = {}
    signature_of: dict[fx.Node, str] = {}
    classes: dict[fx.Node, str] = {}
    first: dict[str, fx.Node] = {}
    for node in kernels:
        signature_of[node] = text = signature(node)
        first.setdefault(text, node)
        classes[node] = class_of(node.target)
    recorded = table.get(target.profiles, sorted(first)) if table is not None and target.profiles else {}
    for text, node in first.items():
        known = recorded.get(text)
        found[text] = known if known is not None else _modelled(node, classes[node], target)
        if cp > 1 and classes[node] == "attention":
            once = found[text]
            found[text] = once._replace(
                cost_ns=cp * once.cost_ns, workspace_bytes=once.workspace_bytes + 2 * _keys_and_values(node)
            )
    seconds = time.perf_counter() - start
    profiled = Profiled({n: found[s] for n, s in signature_of.items()}, len(first), len(recorded), seconds)
    words = f"a roofline of {target.name}"
    if recorded:
        words = f"{len(recorded)} of {len(first)} kinds of kernels recorded on {target.name}, the others from {words}"
    without = unsized(node for text, node in first.items() if text not in recorded)
    return Priced(profiled, classes, "; ".join(filter(None, (words, without))))


def class_of(operator: Any) -> str:
    """The class of the kernels of an operator: one of those of `remat.target.devices.ACHIEVED`.

    Example:
        >>> class_of(torch.ops.aten.addmm.default), class_of(torch.ops.aten.gelu_backward.default)
        ('matmul', 'pointwise')
    """
    if not isinstance(operator, _compat.OpOverload):
        return "other"
    if _compat.is_collective(operator):
        return "collective"
    name = _compat.operator_name(operator)
    if name in _MATMUL:
        return "matmul"
    if "convolution" in name:
        return "convolution"
    if "attention" in name:
        return "attention"
    if any(word in name for word in _GATHER):
        return "gather"
    if any(word in name for word in _REDUCTION):
        return "reduction"
    return "pointwise" if _compat.is_known(operator) else "other"


def _modelled(node: fx.Node, kind: str, target: Target) -> Profile:
    if kind == "collective":
        return modelled_collective(node)
    share, moved = target.achieved[kind], sum(map(bytes_of, operands(node)))
    operations = operations_of(node)
    if target.counts_operations:
        made = sum(int(t.numel()) for t in tensors(node.meta.get("val")))
        return Profile(operations or made, workspace_bytes(node))
    bandwidth = target.bandwidth * (target.achieved["pointwise"] if operations else share)
    seconds = moved / bandwidth
    if operations:
        seconds = max(seconds, operations / (_peak(target, kind, operands(node)) * share))
    return Profile(rounded(target.launch_ns + seconds * 1e9), workspace_bytes(node))


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that live only while a kernel runs, where they follow from its shapes: flash attention's backward pass.

    It accumulates the gradient of the queries in float32 and holds a sum for each row, both with rows rounded up to 128
    and heads to 32; with fewer heads of keys than of queries it expands the gradients of keys and values
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd). What cuBLAS keeps for products is in
    `Target.context_bytes`. `unsized` names the kernels whose workspaces are not known.
    """
    if node.target is not fake_cuda.FLASH_ATTENTION_BACKWARD:
        return 0
    _, query, key = (a.meta["val"] for a in node.args[:3] if isinstance(a, fx.Node))
    batch, heads, rows, width = (int(n) for n in query.shape)
    rows = -(-rows // 128) * 128
    found = 4 * batch * heads * rows * (-(-width // 32) * 32 + 1)
    if key.shape[1] != heads:
        found += 2 * batch * heads * int(key.shape[2]) * width * int(key.element_size())
    return found


def unsized(kernels: Iterable[fx.Node]) -> str:
    """In words, which kernels have a workspace that nothing here tells, so that it counts as 0; empty: none has.

    They run whole, by an algorithm that a library chooses on the device: convolutions, attention that is not flash's,
    linear algebra, transforms, sorting, and what is no operator of torch's.
    """
    found = set()
    for node in kernels:
        name = _compat.operator_name(node.target) if isinstance(node.target, _compat.OpOverload) else ""
        kind = class_of(node.target)
        if kind == "attention" and "flash" not in name:
            found.add("attention that is not flash's")
        elif kind == "convolution":
            found.add("convolutions")
        elif kind == "other" or any(word in name for word in _UNSIZED):
            found.add(name or str(getattr(node.target, "__name__", node.target)))
    return f"workspaces of {', '.join(sorted(found))} are not known and count as 0" if found else ""


def _keys_and_values(node: fx.Node) -> int:
    """Bytes of an attention's keys and values; in the backward pass their gradients come by, too."""
    assert isinstance(node.target, _compat.OpOverload)
    backward = "backward" in _compat.operator_name(node.target)
    first = 2 if backward else 1
    found = [bytes_of(a.meta["val"]) for a in node.args[first : first + 2] if isinstance(a, fx.Node)]
    return sum(found) * (2 if backward else 1)


def _peak(target: Target, kind: str, found: Sequence[torch.Tensor]) -> float:
    """The peak of the dtype of a kernel's first tensor of numbers; of one that is not in the table, the lowest."""
    dtype = next((t.dtype for t in found if t.dtype.is_floating_point or t.dtype.is_complex), torch.float32)
    name = str(dtype).removeprefix("torch.")
    name = "float8" if name.startswith("float8") else name
    if name == "float32":
        backends: Any = torch.backends
        library = backends.cudnn.conv if kind == "convolution" else getattr(backends, NAMED.type).matmul
        name = "tf32" if library.fp32_precision == "tf32" and "tf32" in target.peak else name
    return target.peak.get(name, min(target.peak.values()))


def spread(recomputed_ns: Mapping[str, int], total_ns: Mapping[str, int], within: float = 0.2) -> tuple[float, float]:
    """The least and the most that a plan costs more, as a share, if each class is off by up to a factor 1 ± `within`.

    The classes are off independently. The overhead is a quotient of two sums that are linear in the factors, so its
    extremes lie where each factor is at an end of its range: all of those are tried.

    Example:
        >>> spread({"matmul": 10, "pointwise": 0}, {"matmul": 50, "pointwise": 50})
        (0.08, 0.12)
    """
    names = sorted(name for name in total_ns if total_ns[name])
    # ordered by how much of a class is computed again: the extremes raise all classes from some place on
    names.sort(key=lambda name: recomputed_ns.get(name, 0) / total_ns[name])
    ends = []
    for cut in range(len(names) + 1):
        for low, high in ((1 - within, 1 + within), (1 + within, 1 - within)):
            factors = {name: low if i < cut else high for i, name in enumerate(names)}
            whole = sum(factors[name] * total_ns[name] for name in names)
            again = sum(factors[name] * recomputed_ns.get(name, 0) for name in names)
            ends.append(again / whole if whole else 0.0)
    return min(ends), max(ends)
