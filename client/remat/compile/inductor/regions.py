"""Fusion regions: the kernels that Inductor runs as one, what each of them costs, and the graph that is planned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from remat_ir import Graph

from ... import _compat
from ..._compat import inductor
from ...capture.dataflow import Dataflow, is_random, maker, reached, tensors
from ...capture.group import groups
from ...capture.operations import Kind, Op, Operations, getitems, operations, to_graph
from ...planning.profiles import Profile, ProfileTable
from ...profiling.inputs import materialize
from ...profiling.profile import believed, describe_tensor, device_kind, device_of_values, profile_kernels
from ...profiling.timing import times
from .joint import RUN

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


def region_graph(step: Operations, costs: Mapping[Op, Profile], fixed_bytes: int) -> Graph:
    """The graph of a step's regions; `costs` are of the ops that run kernels.

    What stays inside a region needs no memory, but for the results of kernels that are never fused.
    """
    nothing = {n: Profile(0, 0) for n in step.flow.kernels}
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


def _inside(step: Operations, op: Op) -> int:
    """Bytes that a region makes for itself beyond its outputs, which take the place of what has been read."""
    own = {s for n in op.nodes if not inductor.is_fusible_node(n) for s in step.flow.makes[n]} - set(op.makes)
    return max(0, sum(step.sizes[s] for s in own) - sum(step.sizes[s] for s in op.makes))


def region_costs(step: Operations, table: ProfileTable | None, functional: Collection[str] = ()) -> dict[Op, Profile]:
    """Time in ns and workspace in bytes of each region, looked up in the table first and measured if unknown.

    A kernel that nothing is fused with runs as torch's own and is measured as such, in plain Inductor's layouts. A
    region is compiled alone, which takes Inductor seconds for each signature that the table does not know yet.
    `functional` is as for `profile_kernels`.
    """
    ops = [op for op in step.ops if op.kind is Kind.KERNELS]
    alone = [op for op in ops if len(op.nodes) == 1 and not inductor.is_fusible_node(op.nodes[0])]
    heavy = [n for op in ops for n in op.nodes if not inductor.is_fusible_node(n)]
    as_run = {n: inductor.alone(n, n.meta[RUN]) if RUN in n.meta else n for n in heavy}
    profiled = profile_kernels(as_run.values(), table, functional=functional).kernels
    kernels = {n: profiled[run] for n, run in as_run.items()}
    graphs = {op: region_module(step.flow, op) for op in ops if op not in set(alone)}
    signatures = {op: signature(module) for op, module in graphs.items()}
    device = "inductor " + device_kind(n for op in ops for n in op.nodes)
    known: dict[str, Profile] = {}
    if table is not None and signatures:
        found = table.get(device, sorted(set(signatures.values())))
        written = {
            signatures[op]: [n for n in op.nodes if set(step.flow.storages_of.get(n, ())) & set(op.makes)]
            for op in graphs
        }
        known = believed(found, written)
    unknown = {text: op for op, text in signatures.items() if text not in known}
    took = _times({text: graphs[op] for text, op in unknown.items()})
    fresh = {
        text: Profile(took[text], max((kernels[n].workspace_bytes for n in op.nodes if n in kernels), default=0))
        for text, op in unknown.items()
    }
    if table is not None and fresh:
        stands = table.put(device, fresh)
        fresh = {s: stands.get(s, m) for s, m in fresh.items()}
    known |= fresh
    return {op: kernels[op.nodes[0]] if op not in graphs else known[signatures[op]] for op in ops}


def region_module(flow: Dataflow, op: Op) -> fx.GraphModule:
    """A region as a graph of its own: a function of what it reads that returns what it makes for others."""
    order = _needed(flow, op)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in order:
        if _is_outside(flow, op, node):
            env[node] = graph.placeholder(f"in{len(env)}")
            env[node].meta = {"val": _value(node)}
    for node in order:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = {"val": node.meta.get("val")}
    results = []
    wanted = set(op.makes)
    for node in order:
        held = set(flow.storages_of.get(node, ())) & wanted
        if held and not _is_outside(flow, op, node) and isinstance(node.meta.get("val"), torch.Tensor):
            results.append(env[node])
            wanted -= held
    graph.output(tuple(results))
    return fx.GraphModule(flow.joint, graph)


def _needed(flow: Dataflow, op: Op) -> list[fx.Node]:
    """A region's nodes, its getitems, the views that it looks through, and what comes from outside, in order."""
    roots = [n for node in op.nodes for n in (node, *getitems(node))]
    found = reached(roots, lambda node: () if _is_outside(flow, op, node) else node.all_input_nodes)
    return [n for n in flow.joint.graph.nodes if n in found]


def _is_outside(flow: Dataflow, op: Op, node: fx.Node) -> bool:
    root = maker(node)
    return node.op != "call_function" or (root in flow.makes and root not in op.nodes)


def _value(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target))
    return node.meta.get("val")


def signature(module: fx.GraphModule) -> str:
    """A hash of all that a region's cost depends on: operators, wiring, shapes, strides, dtypes, constants."""
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    text = []
    for node in module.graph.nodes:
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"#{number[n]}")
        values = [describe_tensor(t) for t in tensors(node.meta.get("val"))]
        text.append([node.op, str(node.target) if node.op == "call_function" else "", repr(args), values])
    return hashlib.sha256(json.dumps(text, separators=(",", ":")).encode()).hexdigest()[:32]


def _times(modules: Mapping[str, fx.GraphModule]) -> dict[str, int]:
    """The time of each region in ns; all are compiled first, and take turns."""
    inputs = {text: [n for n in module.graph.nodes if n.op == "placeholder"] for text, module in modules.items()}
    with _compat.only_real_tensors(), torch.no_grad():
        functions = {
            text: inductor.run(module, [materialize(n) for n in inputs[text]])
            for text, module in sorted(modules.items())
        }

        def call(text: str) -> Callable[[], object]:
            given = [materialize(n) for n in inputs[text]]
            return lambda: functions[text](list(given))

        where = {text: device_of_values(nodes) for text, nodes in inputs.items()}
        return times({text: partial(call, text) for text in functions}, where).costs
