"""The traced step of torchtitan's graph trainer as a joint graph, and what a plan of it keeps on the host.

`apply_cpu_offload_pass` (torchtitan 0.3.0) copies what is tagged `MUST_CPU_OFFLOAD` out when it is made. The device's
copy goes at the end of the next layer, or of the layer of its last use, and comes back one layer before the first one
of the backward pass that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, takewhile
from typing import Any, NamedTuple

import torch
from torch import fx

from remat_ir import Compute, Graph, Offload, Plan, Prefetch, Step, Wait

from .._compat import tags as torch_tags
from ..capture.dataflow import Dataflow, ancestors
from ..capture.operations import Kind, Operations
from ..errors import CaptureError

_FIRST_GRADIENTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("ones_like", "full_like", "ones", "full")
)
_NOT_AGAIN = ("lm_head", "loss")
"""Modules of which the trainer runs nothing again."""


def as_joint(module: fx.GraphModule) -> int:
    """Make a traced step of loss and gradients a joint graph, in place: the gradient of the loss becomes a tangent.

    Returns how many results are the forward pass's.

    Raises:
        CaptureError: it is no such step.
    """
    nodes = list(module.graph.nodes)
    backward = set(filter(torch_tags.is_backward, nodes))
    found: Any = module.graph.output_node().args[0]
    results = found if isinstance(found, (list, tuple)) else ()
    outputs = next((i for i, n in enumerate(results) if n in backward), len(results))
    begins = [n for n in nodes if n.target in _FIRST_GRADIENTS and n.users and all(u in backward for u in n.users)]
    before = {*takewhile(lambda node: node not in backward, nodes), *begins}
    lacks = None
    if not backward or not outputs or outputs == len(results) or not begins:
        lacks = "no results that are gradients, begun by a gradient of ones"
    elif ancestors([n for n in results[:outputs] if isinstance(n, fx.Node)]) - before:
        lacks = "a backward pass in parts, between which the forward pass goes on"
    if lacks is not None:
        raise CaptureError(f"a traced step with loss and gradients is needed, and this one has {lacks}")
    for number, node in enumerate(begins):
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            tangent = module.graph.placeholder(f"tangents_{number + 1}")
        tangent.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(tangent)
        module.graph.erase_node(node)
    return outputs


def run_once(flow: Dataflow) -> set[fx.Node]:
    """Kernels that the trainer does not run again: those that draw numbers, those of the head and
    the loss, and what is read while the backward pass of these goes on.
    """
    nodes = list(flow.joint.graph.nodes)
    head = [n for n in nodes if torch_tags.module_of(n).startswith(_NOT_AGAIN)]
    early = filter(torch_tags.is_backward, nodes[: nodes.index(head[-1]) + 1] if head else ())
    read = {flow.owner[s] for n in early for source in n.all_input_nodes for s in flow.storages_of.get(source, ())}
    drawn = [n for n in nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    return read.union(head, drawn).intersection(flow.kernels)


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
    """The values that a plan brings back from the host once the backward pass has begun."""
    begins = (at for at, step in enumerate(plan.steps) if isinstance(step, Compute) and step.op == graph.backward_from)
    return frozenset(step.value for step in plan.steps[next(begins) :] if isinstance(step, Prefetch))


def stays(step: Operations) -> dict[int, Stay]:
    """The storages that the trainer can move, each with its stay on the host."""
    nodes = [n for n in step.flow.joint.graph.nodes if n.op == "call_function"]
    place = {node: i for i, node in enumerate(nodes)}
    forward = _by_layers(takewhile(lambda node: not torch_tags.is_backward(node), nodes))
    region = {node: i for i, part in enumerate(forward) for node in part}
    begins: dict[int, int] = {}  # where the backward pass of each layer begins, the last one first
    for part in _by_layers(filter(torch_tags.is_backward, nodes)):
        begins.setdefault(torch_tags.layer_of(part[0]), place[part[0]])
    first = min(begins.values())
    begins.pop(torch_tags.NO_LAYER, None)
    before = dict(zip(begins, [first, *begins.values()], strict=False))  # one layer earlier
    found: dict[int, Stay] = {}
    for storage, node, users in _movable(step):
        if node not in region:
            continue
        read = min(place[user] for user in users if torch_tags.is_backward(user))
        last = max((region[user] for user in users if user in region), default=0)
        leaves = place[forward[min(max(region[node] + 1, last), len(forward) - 1)][-1]]
        layer = torch_tags.layer_of(node)
        if layer not in begins or before[layer] == begins[layer]:
            found[storage] = Stay(node, leaves, read)
        elif before[layer] <= read:  # else the copy back would begin behind its first reader
            found[storage] = Stay(node, leaves, before[layer])
    return found


def _by_layers(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    return [list(part) for _, part in groupby(nodes, torch_tags.layer_of)]


def _movable(step: Operations) -> Iterator[tuple[int, fx.Node, list[fx.Node]]]:
    """Storages of the forward pass that the trainer's pass follows: each with its node and all that reads that.

    Its views must be some that the pass knows, since it frees the storage under the others; and something of the
    backward pass must read it, since for what runs again alone it moves nothing.
    """
    flow = step.flow
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


def with_copies(order: Sequence[int], away: Mapping[int, Stay], step: Operations, values: Sequence[int]) -> Plan:
    """Ops in an order, those of the forward pass first, with the copies of what goes to the host between the passes.

    Args:
        away: the storages that go, with their stays. values: [values of the graph] the storage of each.
    """
    place = {node: i for i, node in enumerate(n for n in step.flow.joint.graph.nodes if n.op == "call_function")}
    when: list[int] = []  # [order] the place of what runs, or for which something runs again
    for at in range(len(order) - 1, -1, -1):
        op = step.ops[order[at]]
        again = order[at] < step.turn < at
        when.append(when[-1] if again else place.get(op.nodes[0], -1) if op.kind is Kind.KERNELS else -1)
    when.reverse()
    steps: list[list[Step]] = [[Compute(op)] for op in order]
    for value, storage in enumerate(values):
        if storage in away:
            gone = max(at for at in range(step.turn) if when[at] <= away[storage].leaves)
            steps[gone] += Offload(value), Wait(value)
            behind = range(step.turn + 1, len(order))
            due = (at for at in behind if when[at] >= away[storage].returns or storage in step.ops[order[at]].reads)
            steps[next(due)].insert(0, Prefetch(value))
    return Plan(tuple(chain.from_iterable(steps)))
