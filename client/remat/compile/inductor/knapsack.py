"""remat as the solver of torch's own memory budget, for jobs that keep torch's partitioner and compile stack."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Unpack

from torch import fx

from remat_ir import Answer, Compute, Plan, Problem, plain_peak, verify

from ... import _compat
from ..._compat import inductor
from ..._compat.tags import forward_results
from ...capture.dataflow import is_random, resident_bytes, value_bytes
from ...capture.group import groups
from ...capture.operations import Operations, operations, to_graph
from ...distributed import planner_of
from ...errors import CaptureError
from ...planning.budget import UnitBytes, bounded
from ...planning.options import PlanFields, SolveOptions, solve_options
from ...planning.planner import Planner, plan_or_raise
from ...profiling.profile import profile_kernels
from .backend import MOST_KNOWN
from .joint import joint_of


class MemoryBudgetSolver(inductor.CustomKnapsackSolver):
    """What `torch._functorch.config.activation_memory_budget_solver` may be set to: remat's plan picks what runs again.

    Torch asks it where `activation_memory_budget` is between 0 and 1: which of the values that only recomputation can
    save memory on may be computed again, so that what is held from the forward to the backward pass stays within that
    share. remat plans the joint graph with its measured costs, and allows what its plan computes again.

    What is lost against `remat.backend`: torch bounds what is held and not the peak; it computes a value again once at
    most, and its own cut and order decide what is saved and when, so that the plan's cost and bound are not those of
    the step that runs.

    Args:
        planner: as for `remat.optimize`.
        options, fields: those of `remat.SolveOptions` that concern a plan.

    Attributes:
        answers: the planner's answers for the graphs planned lately, in order.

    Example:
        >>> import torch._functorch.config as functorch
        >>> solver = MemoryBudgetSolver("greedy")
        >>> with functorch.patch(activation_memory_budget=0.5, activation_memory_budget_solver=solver):
        ...     pass  # compile and run the first step here

    Raises:
        InvalidData: not a planner, or not an option.
        CaptureError: in a compilation, a graph that cannot be planned, such as one with dropout, for which torch's own
            budget gives wrong gradients; the message says why.
        BudgetTooSmall, NothingFound: in a compilation, no plan holds so little.
    """

    def __init__(
        self,
        planner: Planner | str | None = None,
        options: SolveOptions | None = None,
        **fields: Unpack[PlanFields],
    ) -> None:
        self.asking = solve_options(MemoryBudgetSolver, PlanFields, options, fields)
        self.planner = planner_of(planner, self.asking)
        self.answers: list[Answer] = []

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: object,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """The positions of the values that torch must not compute again, and of those that it may."""
        nodes = all_recomputable_banned_nodes
        module = joint_graph.owning_module
        if module is None:
            raise CaptureError("torch handed over a joint graph without its module, which cannot be planned")
        flow = joint_of(module, forward_results(joint_graph)).flow
        if any(map(is_random, flow.kernels)):
            raise CaptureError(
                "the step draws random numbers, and torch's memory budget draws them anew in the backward pass: its "
                "gradients would be wrong; use remat.backend(budget=…), or train without dropout"
            )
        step = operations(flow, groups(flow))
        results = {s for n in flow.forward_results if isinstance(n, fx.Node) for s in flow.storages_of.get(n, ())}
        held = _bytes_of(memory, nodes, max_memory) + sum(flow.sizes[s] for s in results)
        with _compat.only_real_tensors():
            profiled = profile_kernels(flow.kernels, self.planner.profiles)
            graph, _ = to_graph(step, profiled.kernels, resident_bytes(flow))
            peak = plain_peak(graph) - graph.fixed_bytes
            problem = Problem(bounded(graph, UnitBytes(peak, min(held, peak))), graph.fixed_bytes + peak)
            answer = plan_or_raise(self.planner.plan(problem, self.asking))
        if not isinstance(answer.plan, Plan):
            raise CaptureError(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        self.answers.append(answer)
        del self.answers[:-MOST_KNOWN]
        again = _computed_again(step, answer.plan)
        named = {node.name: node for node in flow.joint.graph.nodes}
        copies = [named.get(node.name) for node in nodes]
        owners = [set() if n is None else {flow.owner[s] for s in flow.storages_of.get(n, ())} for n in copies]
        allowed = [i for i, makers in enumerate(owners) if not makers or makers <= again]
        return sorted(set(range(len(nodes))) - set(allowed)), allowed

    def uuid(self) -> bytes:
        """What torch's caches of compiled code tell solvers apart by."""
        fields = (version("remat"), repr(self.planner.asked), repr(self.asking))
        return json.dumps(fields).encode()


def _bytes_of(memory: list[float], nodes: list[fx.Node], most: float) -> int:
    """The bytes that a share of torch's stands for: `memory` is that of each node in the same measure."""
    share, node = max(zip(memory, nodes, strict=True), key=lambda pair: pair[0])
    size = value_bytes(node)
    return round(most * size / share) if share else 0


def _computed_again(step: Operations, plan: Plan) -> set[fx.Node]:
    """The kernels that a plan runs more than once."""
    seen: set[int] = set()
    again: set[int] = set()
    for each in plan.steps:
        if isinstance(each, Compute):
            (again if each.op in seen else seen).add(each.op)
    return {node for op in again for node in step.ops[op].nodes}
