"""A joint graph that torch partitions, as a problem whose plan is a choice of tags."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from remat_ir import Compute, Free, Graph, Plan, peak_of, plan_of, tagged_plan

from .. import _compat
from .._compat import tags as torch_tags
from ..capture.dataflow import Dataflow, dataflow, is_random, stateless, updates_as_results
from ..capture.group import groups
from ..capture.operations import Kind, Operations, operations, to_graph
from ..capture.refused import refuse
from ..errors import CaptureError
from ..planning.profiles import ProfileTable
from ..profiling.profile import profile_kernels

SMALL_BYTES = 4096
"""Random results up to this size are saved: keeping a generator's state for them would take more."""


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint graph as a planning problem.

    Attributes:
        step: its ops, kernels in groups; what torch cannot run again runs once.
        graph: the same as a problem's graph, without a budget.
        fine, fine_graph: the same with each kernel an op of its own.
    """

    step: Operations
    graph: Graph
    fine: Operations
    fine_graph: Graph

    def kernels_of(self, ops: Collection[int]) -> frozenset[str]:
        """The names of the nodes of some ops."""
        return frozenset(
            n.name for op in ops if self.step.ops[op].kind is Kind.KERNELS for n in self.step.ops[op].nodes
        )

    def peak_of(self, again: Collection[str]) -> int:
        """The peak in bytes where these kernels are computed again, kernel by kernel.

        Groups run where their first kernel is planned, and torch runs the kernels of the backward pass as they were
        traced, so that it may differ from the plan's.
        """
        ops = [i for i, op in enumerate(self.fine.ops) if op.kind is Kind.KERNELS and op.nodes[0].name in again]
        return peak_of(self.fine_graph, tagged_plan(self.fine_graph, ops))


def joint_of(
    module: fx.GraphModule,
    forward_outputs: int | None,
    table: ProfileTable,
    functional: Sequence[str] = (),
    *,
    whole_step: bool = False,
) -> Joint:
    """Analyse a copy of a joint graph and measure its kernels; nodes keep their names.

    Args:
        forward_outputs: how many results are the forward pass's; None: by the number of inputs.
        whole_step: the graph is a step of loss and gradients, as torchtitan traces it.

    Raises:
        CaptureError: the graph cannot be planned; the message says why.
    """
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    saved: frozenset[str] = frozenset()
    if whole_step:
        try:
            forward_outputs, saved = torch_tags.as_joint(module)
        except ValueError as error:
            raise CaptureError(f"a traced step with loss and gradients is needed, and this one has {error}") from None
    elif forward_outputs is None:
        forward_outputs = torch_tags.forward_results(module.graph)
    updates = updates_as_results(module.graph)
    refuse(module)
    flow = dataflow(module, forward_outputs + len(updates))
    if updates:
        flow = replace(flow, mutated=updates)
    once = _run_once_by_torch(flow) | {n for n in flow.kernels if n.name in saved}

    def planned(step: Operations) -> Operations:
        return replace(step, once=step.once | once)

    with _compat.only_real_tensors():
        measured = profile_kernels(flow.kernels, table, functional=functional).kernels
        step = planned(operations(flow, groups(flow), functional=functional))
        fine = planned(operations(flow, functional=functional))
        fixed = sum(flow.sizes[s] for s in {s for p in flow.primals for s in flow.storages_of.get(p, ())})
        graph, _ = to_graph(step, measured, fixed)
        fine_graph, _ = to_graph(fine, measured, fixed)
    return Joint(step, graph, fine, fine_graph)


def _run_once_by_torch(flow: Dataflow) -> frozenset[fx.Node]:
    """Kernels that torch cannot run again in the backward pass, or had better not.

    Batch normalization in training would update its statistics again; what reads an input that the step overwrites
    would read the new one, and autograd refuses that; a small draw is cheaper to save than the generator's state.
    """
    overwritten = {s for node in flow.mutated for s in flow.storages_of.get(node, ())}
    return frozenset(
        node
        for node in flow.kernels
        if stateless(node) is not None
        or overwritten & set(flow.reads[node])
        or (is_random(node) and sum(flow.sizes[s] for s in flow.makes[node]) <= SMALL_BYTES)
    )


def peak_of_partition(joint: Joint, backward: fx.GraphModule) -> tuple[int, frozenset[str]]:
    """The peak in bytes of torch's own partition of a joint graph, kernel by kernel, and the kernels computed again.

    The forward graph runs each kernel of the forward pass in its order; the backward graph says the rest.
    """
    fine = joint.fine
    number = {n.name: i for i, op in enumerate(fine.ops) if op.kind is Kind.KERNELS for n in op.nodes}
    draws = {_call(n.target, n.args): n.name for n in fine.flow.kernels if is_random(n)}
    order, again = list(range(fine.turn + 1)), set()
    seen = set(order)
    for node in backward.graph.nodes:
        if node.op != "call_function":
            continue  # what is saved has the name of its maker
        call = torch_tags.replayed(node)
        name = node.name if call is None else draws.get(_call(*call), node.name)
        op = number.get(name)
        if op is None:
            continue
        if op <= fine.turn:
            again.add(name)
        order.append(op)
        seen.add(op)
    order += [op for op in range(len(fine.ops)) if op not in seen]
    return _peak(joint.fine_graph, plan_of(joint.fine_graph, order)), frozenset(again)


def _call(target: Any, args: tuple[Any, ...]) -> str:
    return f"{target}{args}"


def _peak(graph: Graph, plan: Plan) -> int:
    """The peak of a plan whose first computations come in any order."""
    memory = peak = graph.fixed_bytes
    size = graph.value_bytes
    for step in plan.steps:
        if isinstance(step, Compute):
            always = graph.op_always[step.op]
            kept = always if step.kept is None else step.kept
            peak = max(peak, memory + sum(size[v] for v in {*always, *kept}) + graph.op_workspace_bytes[step.op])
            memory += sum(size[v] for v in kept)
        elif isinstance(step, Free):
            memory -= size[step.value]
    return peak
