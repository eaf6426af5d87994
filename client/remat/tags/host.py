"""What a plan keeps on the host between the passes, where torchtitan's graph trainer puts the copies.

`apply_cpu_offload_pass` (torchtitan 0.3.0) copies what is tagged `MUST_CPU_OFFLOAD` out when it is made. The device's
copy goes at the end of the next layer, or of the layer of its last use, and comes back one layer before the first one
of the backward pass that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

import torch
from torch import fx

from remat_ir import Compute, Drop, Graph, Plan, Prefetch

from .._compat import tags as torch_tags
from ..capture.dataflow import Dataflow
from ..capture.operations import Kind, Operations

LEAST_BYTES = 4096
"""What the trainer's own policy moves at least."""


class Stay(NamedTuple):
    """A storage that the trainer can move: the node that is tagged, and when it is on the host.

    `leaves` is the place among the graph's nodes after which it is off the device, `returns` that before which its copy
    back begins.
    """

    node: fx.Node
    leaves: int
    returns: int


def away_between(graph: Graph, plan: Plan) -> frozenset[int]:
    """The values that a plan has on the host alone when the backward pass begins."""
    away: set[int] = set()
    for step in plan.steps:
        if isinstance(step, Compute) and step.op == graph.backward_from:
            break
        if isinstance(step, Drop):
            away.add(step.value)
        elif isinstance(step, Prefetch):
            away.discard(step.value)
    return frozenset(away)


def stays(step: Operations) -> dict[int, Stay]:
    """The storages that the trainer can move, each with its stay on the host."""
    flow, nodes = step.flow, [n for n in step.flow.joint.graph.nodes if n.op == "call_function"]
    place = {node: i for i, node in enumerate(nodes)}
    forward = [list(part) for _, part in groupby(takewhile(_of_forward, nodes), torch_tags.layer_of)]
    region = {node: i for i, part in enumerate(forward) for node in part}
    backward = [next(part) for _, part in groupby(filter(torch_tags.is_backward, nodes), torch_tags.layer_of)]
    begins: dict[int, fx.Node] = {}  # where each layer begins, the last one first
    for node in backward:
        begins.setdefault(torch_tags.layer_of(node), node)
    layers = [layer for layer in begins if layer != torch_tags.NO_LAYER]
    found: dict[int, Stay] = {}
    for storage, node, users in _movable(step, flow):
        if node not in region:
            continue
        later = min(place[user] for user in users if torch_tags.is_backward(user))
        last = max((region[user] for user in users if user in region), default=0)
        leaves = place[forward[min(max(region[node] + 1, last), len(forward) - 1)][-1]]
        layer = torch_tags.layer_of(node)
        if layer in layers:
            at = layers.index(layer)
            before = place[begins[layers[at - 1]] if at else backward[0]]
            if later < before < place[begins[layer]]:
                continue  # the copy back would begin behind its first reader
            later = before if before < place[begins[layer]] else later
        found[storage] = Stay(node, leaves, later)
    return found


def _of_forward(node: fx.Node) -> bool:
    return not torch_tags.is_backward(node)


def _movable(step: Operations, flow: Dataflow) -> Iterator[tuple[int, fx.Node, list[fx.Node]]]:
    """Storages of the forward pass that the trainer's pass follows: each with its node and all that reads that.

    Its views must be some that the pass knows, since it frees the storage under the others; and something of the
    backward pass must read it, since for what runs again alone it moves nothing.
    """
    named: dict[int, list[fx.Node]] = {}
    for node, storages in flow.storages_of.items():
        for storage in storages if node.op == "call_function" and not torch_tags.is_backward(node) else ():
            named.setdefault(storage, []).append(node)
    for storage, nodes in named.items():
        node, *views = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)] or [nodes[0]]
        value = node.meta.get("val")
        if (
            isinstance(value, torch.Tensor)
            and value.is_contiguous()
            and flow.sizes[storage] >= LEAST_BYTES
            and storage not in step.keep
            and flow.owner[storage] in flow.makes
            and all(torch_tags.is_known_view(view) for view in views)
        ):
            users = [user for n in (node, *views) for user in n.users if user.op == "call_function"]
            if any(map(torch_tags.is_backward, users)):
                yield storage, node, users


def away_in(
    chosen: Mapping[int, Stay], fine: Operations, graph: Graph, values: Sequence[int], order: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Value → the last place in an order of kernels at which it is there, and the first at which it is back.

    Args:
        chosen: the storages that go, with their stays. values: [values of `graph`] the storage of each.
        fine, graph: the step kernel by kernel. order: its ops as they run, those of the forward pass first.
    """
    place = {node: i for i, node in enumerate(n for n in fine.flow.joint.graph.nodes if n.op == "call_function")}
    starts = [place.get(op.nodes[0], -1) if op.kind is Kind.KERNELS else -1 for op in fine.ops]
    begins = [fine.turn + 1]  # the places in the order at which what is for the next op of the backward pass begins
    begins += [at + 1 for at in range(fine.turn + 1, len(order)) if order[at] > fine.turn]
    found: dict[int, tuple[int, int]] = {}
    for value, storage in enumerate(values):
        if storage in chosen:
            stay = chosen[storage]
            gone = max(op for op in range(fine.turn) if starts[op] <= stay.leaves)
            behind = range(fine.turn + 1, len(order))
            after = (i for i, op in enumerate(range(fine.turn + 1, graph.ops)) if starts[op] >= stay.returns)
            read = (at for at in behind if value in graph.op_inputs[order[at]])
            found[value] = gone, min(begins[next(after, -1)], next(read, len(order)))
    return found
