"""Fusion regions: the kernels that Inductor runs as one, and the graph of them that is planned."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import fx

from remat_ir import Graph

from ..._compat import inductor
from ...capture.dataflow import Dataflow, is_random
from ...capture.group import groups
from ...capture.operations import Kind, Measured, Op, Operations, operations, to_graph

REGION = "remat_region"
"""Of a node: the number of its region, which the nodes that are lowered from it keep."""


def regions(flow: Dataflow, one_plan: bool = False, functional: Collection[str] = ()) -> Operations:
    """The step as fusion regions: what Inductor fuses is one op where no option is lost by it.

    Seeds are drawn once and kept; what is made of them can be made again, since it is a pure function of its seed.
    `one_plan` and `functional` are as for `operations`.
    """
    fusible = groups(flow, cheap=inductor.is_fusible_node, fused=True)
    step = operations(flow, fusible, replayed=False, one_plan=one_plan, functional=functional)
    for index, op in enumerate(step.ops):
        if op.kind is Kind.KERNELS:
            for node in op.nodes:
                node.meta[REGION] = index
    return step


def region_graph(step: Operations, costs: Mapping[Op, Measured], fixed_bytes: int) -> Graph:
    """The graph of a step's regions; `costs` are of the ops that run kernels.

    What stays inside a region needs no memory, but for the results of kernels that are never fused.
    """
    nothing = {n: Measured(0, 0) for n in step.flow.kernels}
    graph, _ = to_graph(step, nothing, fixed_bytes)
    once = {i for i, op in enumerate(step.ops) if any(is_random(n) for n in op.nodes)}
    return replace(
        graph,
        op_cost_ns=tuple(costs[op].cost_ns if op.kind is Kind.KERNELS else 0 for op in step.ops),
        op_workspace_bytes=tuple(
            _inside(step, op) + costs[op].workspace_bytes if op.kind is Kind.KERNELS else step.takes(op)
            for op in step.ops
        ),
        once=tuple(sorted({*graph.once, *once})),
    )


def fused(node: fx.Node) -> bool:
    """Whether a kernel may be fused with others."""
    return inductor.is_fusible_node(node)


def _inside(step: Operations, op: Op) -> int:
    """Bytes that a region makes for itself beyond its outputs, which take the place of what has been read."""
    own = {s for n in op.nodes if not fused(n) for s in step.flow.makes[n]} - set(op.makes)
    return max(0, sum(step.sizes[s] for s in own) - sum(step.sizes[s] for s in op.makes))
