"""A graph of Dynamo's around what no plan can hold: sparse gradients, and tensors without strides, as jagged ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from .. import _compat
from ..capture.dataflow import tensors

log = logging.getLogger("remat")

_SPARSE_AT = {F.embedding: 6, F.embedding_bag: 7, torch.embedding: 4}
"""Where an operator takes whether its gradient is sparse."""


class _Part(nn.Module):
    """A part that runs by plans."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def divided(module: fx.GraphModule, make: Callable[[fx.GraphModule], Callable[..., Any]]) -> fx.GraphModule | None:
    """A graph whose parts run one after the other: those that no plan can hold as they are, the others by plans.

    None: it has no such part; or nothing else; or a mode of torch's is set somewhere in it, which a cut might leave on.

    Args:
        make: what runs a part by plans.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    apart = [_is_apart(node) for node in nodes]
    sets_modes = any(node.op == "call_function" and _compat.example_of(node) is None for node in nodes)
    if sets_modes or len(set(apart)) < 2:
        return None
    part, count = dict[fx.Node, int](), 0
    for i, node in enumerate(nodes):
        count += i > 0 and apart[i] != apart[i - 1]
        part[node] = count
    found = split_module(module, module, part.__getitem__, keep_original_order=True)
    plain = {f"submod_{part[node]}" for node, is_apart in zip(nodes, apart, strict=True) if is_apart}
    examples = {node.name: _compat.example_of(node) for node in module.graph.nodes}
    for call in found.graph.find_nodes(op="call_module"):
        if call.target not in plain:
            inside = getattr(found, str(call.target))
            _compat.set_examples(inside, examples)
            setattr(found, str(call.target), _Part(make(inside)))
    log.info("what no plan can hold runs as it is, between %d parts that are planned", count + 1 - len(plain))
    return found


def _is_apart(node: fx.Node) -> bool:
    at = _SPARSE_AT.get(node.target)  # type: ignore[arg-type]
    if at is not None and (node.kwargs.get("sparse") or (len(node.args) > at and node.args[at])):
        return True
    seen: Sequence[fx.Node] = (node, *node.all_input_nodes)
    return any(t.layout is not torch.strided for each in seen for t in tensors(_compat.example_of(each)))
