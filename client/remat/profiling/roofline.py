"""What a kernel does, by its shapes: operations and bytes, and which kernels take far more for them than others do."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..capture.dataflow import tensors

FAR = 5.0
"""The factor by which a kernel may be off what others take for as much work; beyond it, it is looked at again."""

BALANCE = 8
"""Operations that take no longer than moving a byte does: a product of few operations is one that moves its bytes."""

SMALL = 100
"""Kernels below so small a part of the whole are not looked at: they are calls more than work."""


def operations_of(node: fx.Node) -> int:
    """Floating-point operations of a product, a convolution or an attention, by torch's own formulas; 0 for others."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def bytes_of(tensor: torch.Tensor) -> int:
    """What of a tensor lies in memory: an expanded dimension is there once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= int(size) if stride or size == 0 else 1
    return elements * tensor.element_size()


def operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a kernel reads, and those that it makes."""
    read = (t for argument in node.all_input_nodes for t in tensors(argument.meta.get("val")))
    return [*read, *tensors(node.meta.get("val"))]


def outliers(costs: Mapping[str, int], nodes: Mapping[str, fx.Node]) -> list[str]:
    """The kernels that take far more or far less than a roofline of all of them suggests, what matters most first.

    No figure of the device is needed: what an operation and a byte take is the median over the kernels themselves, of
    products by their operations, of all others by their bytes.

    Args:
        costs: in ns, of each kind of kernel.
        nodes: a kernel of each kind.
    """
    least = sum(costs.values()) // SMALL
    work = {name: _work(nodes[name]) for name in sorted(costs)}
    rates: dict[bool, list[float]] = {}
    for name, (product, amount) in work.items():
        if costs[name] > least:
            rates.setdefault(product, []).append(costs[name] / amount)
    usual = {kind: median_low(found) for kind, found in rates.items()}
    found = {}
    for name, (product, amount) in work.items():
        expected = usual.get(product, 0.0) * amount
        low, high = sorted((costs[name], expected))
        if high > least and high > FAR * low:
            found[name] = high
    return sorted(found, key=lambda name: -found[name])


def _work(node: fx.Node) -> tuple[bool, int]:
    """Whether a kernel is a product, and its operations if it is, else its bytes."""
    operations, moved = operations_of(node), sum(map(bytes_of, operands(node)))
    return operations > 0, max(1, operations, BALANCE * moved) if operations else max(1, moved)
