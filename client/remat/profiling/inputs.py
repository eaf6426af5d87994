"""What a kernel is measured on: tensors made from its metadata, or what the kernels before it make of such ones."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .. import _compat, generators
from ..capture.dataflow import is_unknown, value_of

DEPTHS = (0, 2, 4, 8, 32, None)
"""So many nodes back are run to make a kernel's inputs, for as long as it refuses them; None: all the way."""


def arguments(node: fx.Node, depth: int | None = 0, given: Mapping[fx.Node, torch.Tensor] | None = None) -> Any:
    """A kernel's positional and keyword arguments, made up `depth` nodes before it and computed from there.

    Args:
        given: real values of the graph's inputs, which are taken where the way back reaches them.

    Raises:
        RuntimeError: a collective, or an operator that may do anything, is among what would run.
    """
    order = _before(node, depth)
    made: dict[fx.Node, Any] = {}
    readers = dict.fromkeys(order, 0)
    for n in (*order, node):
        for source in n.all_input_nodes:
            if source in readers:
                readers[source] += 1

    def value(source: fx.Node) -> Any:
        if source in made:
            return made[source]
        if depth != 0 and given is not None and source in given:
            return given[source]
        return materialize(source)

    for n in order:
        if _compat.is_collective(n.target):
            raise RuntimeError(f"{n.name} is a collective")
        if is_unknown(n):
            raise RuntimeError(f"{n.name} is an operator of which nothing is known")
        args, kwargs = fx.map_arg((n.args, dict(n.kwargs)), value)
        made[n] = generators.call(n.target, args, kwargs)()
        for source in n.all_input_nodes:
            if source in readers:
                readers[source] -= 1
                if not readers[source]:
                    del made[source]
    return fx.map_arg((node.args, dict(node.kwargs)), value)


def _before(node: fx.Node, depth: int | None) -> list[fx.Node]:
    """What has to run so that made-up values are `depth` nodes away; several tensors of one node are never made up."""
    found: dict[fx.Node, None] = {}
    level = list(node.all_input_nodes)
    for distance in range(len(node.graph.nodes)):
        far = depth is not None and distance >= depth
        level = [n for n in level if n not in found and n.op == "call_function"]
        level = [n for n in level if not far or isinstance(n.meta.get("val"), (tuple, list))]
        if not level:
            break
        found.update(dict.fromkeys(level))
        level = [source for n in level for source in n.all_input_nodes]
    return [n for n in node.graph.nodes if n in found]


def materialize(node: fx.Node) -> Any:
    """A real value with the metadata of a node."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return value
    return _like(value, _highest_index(node), torch.device("cpu") if _on_host(node) else value.device)


def _on_host(node: fx.Node) -> bool:
    """Whether a kernel of a device leaves this result in the host's memory, where another reads it."""
    if node.target is not operator.getitem:
        return False
    maker, position = node.args
    return isinstance(maker, fx.Node) and position in _compat.RESULTS_ON_HOST.get(maker.target, ())


def _like(fake: torch.Tensor, highest: int, device: torch.device) -> torch.Tensor:
    """A real tensor of the same strided extent; integers are valid indices, spread out where the bound is known."""
    shape, stride = [int(s) for s in fake.shape], [int(s) for s in fake.stride()]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    real = torch.empty(extent, dtype=fake.dtype, device=device)
    if (fake.dtype.is_floating_point or fake.dtype.is_complex) and fake.dtype.itemsize >= 2:
        # where probabilities, variances and logarithms' arguments all lie
        real.uniform_(generator=generators.own(device))
    elif fake.dtype == torch.bool:
        real.fill_(True)
    elif highest > 0 and fake.dtype in (torch.int64, torch.int32):
        real.random_(0, highest, generator=generators.own(device))
    else:
        real.zero_()
    return real.as_strided(shape, stride)


def _highest_index(node: fx.Node) -> int:
    """A bound below which an integer input is a valid index for all embeddings that read it, or 0."""
    bounds = []
    for user in node.users:
        name = str(user.target)
        if name.startswith("aten.embedding.default") and user.args[1] is node:
            bounds.append(int(user.args[0].meta["val"].shape[0]))  # type: ignore[union-attr]
        elif name.startswith("aten.embedding_dense_backward") and user.args[1] is node:
            bounds.append(int(str(user.args[2])))
        else:
            return 0
    return min(bounds, default=0)
