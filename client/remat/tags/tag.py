"""`remat.tag`: a plan written on a joint graph's nodes as the tags that torch's own partitioner reads."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat_ir import (
    Answer,
    Graph,
    InvalidData,
    InvalidPlan,
    Plan,
    Problem,
    greedy_plans,
    readable,
    tagged_plan,
    tags_of,
    verify,
)

from .. import _compat
from .._compat import tags as torch_tags
from ..capture.dataflow import (
    Dataflow,
    dataflow,
    drop_unread_statistics,
    is_random,
    maker,
    resident_bytes,
    stateless,
    updates_as_results,
)
from ..capture.operations import Kind, Operations, notes, operations, to_graph
from ..capture.refused import refuse
from ..distributed import planner_of
from ..errors import CaptureError, NothingFound
from ..lowering.peak import kernel_peak
from ..planning.budget import Budget, bounded, budget_bytes
from ..planning.links import read_link
from ..planning.options import PlanFields, SolveOptions, solve_options
from ..planning.planner import CoordinatedPlanner, Planner, plan_or_raise
from ..planning.profiles import Profile, ProfileTable
from ..profiling.profile import profile_kernels
from .torchtitan import Stay, as_joint, away_between, run_once, stays, with_copies

log = logging.getLogger("remat")

METHOD = "tags"
SMALL_BYTES = 4096
"""Random results up to this size are saved: keeping a generator's state for them would take more."""
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Budgets, as shares of the one asked for, whose greedy plans may fit as torch runs them."""
_ANY = 2**52


@dataclass(frozen=True, eq=False)
class Joint:
    """A joint graph as a planning problem.

    Attributes:
        step: its ops, each kernel one of its own, as torch runs them; what torch cannot run again runs once.
        graph: the same as a problem's graph.
        values: [values of graph] the storage that each stands for.
        measured: what each kernel takes.
    """

    step: Operations
    graph: Graph
    values: tuple[int, ...]
    measured: Mapping[fx.Node, Profile]

    def names_of(self, ops: Iterable[int]) -> frozenset[str]:
        """The names of the kernels among some ops."""
        return frozenset(self.step.ops[op].nodes[0].name for op in ops if self.step.ops[op].kind is Kind.KERNELS)

    def peak_of(self, order: Sequence[int], away: Mapping[int, Stay]) -> int:
        """The peak in bytes of ops in any order, fixed bytes included.

        Args:
            away: the storages that go to the host between the passes.
        """
        plan = with_copies(order, away, self.step, self.values)
        return self.graph.fixed_bytes + kernel_peak(self.step, plan, self.measured)


def joint_of(
    module: fx.GraphModule,
    forward_outputs: int | None,
    table: ProfileTable,
    functional: Sequence[str],
    whole_step: bool,
) -> Joint:
    """Analyse a copy of a joint graph and measure its kernels; nodes keep their names.

    In the graph itself, backward passes of batch normalization in training are given no running statistics any more:
    they do not read them, and torch would hold the new ones until then.

    Args:
        forward_outputs: how many results are the forward pass's; None: by the number of inputs.
        whole_step: the graph is a step of loss and gradients, as torchtitan traces it.

    Raises:
        CaptureError: the graph cannot be planned; the message says why.
    """
    drop_unread_statistics(module)
    module.recompile()
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    if whole_step:
        forward_outputs = as_joint(module)
    elif forward_outputs is None:
        forward_outputs = torch_tags.forward_results(module.graph)
    updates = updates_as_results(module.graph)
    refuse(module)
    flow = dataflow(module, forward_outputs + len(updates))
    if updates:
        flow = replace(flow, mutated=updates)
    with _compat.only_real_tensors():
        measured = profile_kernels(flow.kernels, table, functional=functional).kernels
        step = operations(flow, functional=functional)
        once = step.once.union(_run_once_by_torch(flow), run_once(flow) if whole_step else ())
        step = replace(step, once=once)
        return Joint(step, *to_graph(step, measured, resident_bytes(flow)), measured)


def _run_once_by_torch(flow: Dataflow) -> frozenset[fx.Node]:
    """Kernels that torch cannot run again in the backward pass, or had better not.

    Batch normalization in training would update its statistics again; what reads an input that the step overwrites
    would read the new one, and autograd refuses that; a small draw is cheaper to save than the generator's state.
    """
    overwritten = flow.storages(flow.mutated)
    return frozenset(
        node
        for node in flow.kernels
        if stateless(node) is not None
        or overwritten & set(flow.reads[node])
        or (is_random(node) and sum(flow.sizes[s] for s in flow.makes[node]) <= SMALL_BYTES)
    )


class TagFields(PlanFields, total=False):
    """The fields of `SolveOptions` that concern a tagged graph or a checkpoint, where nothing moves to the host."""

    functional_ops: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Tagged:
    """A joint graph whose nodes have tags, as planned.

    Attributes:
        answer: the plan that torch is to carry out, with its cost, and how far it is from the best.
        peak_bytes: of the step as torch runs it, with what its trainer moves, fixed bytes included.
        again: the names of the nodes that are computed again.
        joint: what was planned.
        host: the names of the nodes that go to the host between the passes, for a pass that moves them.

    Example:
        >>> import torch, torch._functorch.config as functorch
        >>> from remat.tags.passes import TagPass
        >>> model, tags = torch.nn.Linear(8, 8), TagPass("100%", planner="greedy")
        >>> with functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False):
        ...     torch.compile(model, backend="aot_eager", dynamic=False)(torch.ones(4, 8)).sum().backward()
        >>> tags.tagged[0].again
        frozenset()
    """

    answer: Answer
    peak_bytes: int
    again: frozenset[str]
    joint: Joint
    host: frozenset[str] = frozenset()

    def checked(self, backward: fx.GraphModule) -> int:
        """The peak in bytes of torch's partition of the tagged graph, kernel by kernel; where it is more than promised,
        a warning says so.

        Its forward graph runs each kernel of the forward pass in its order. What it saves and no kernel of the backward
        pass is known to read is there as well.

        Args:
            backward: the backward graph of that partition.

        Raises:
            CaptureError: the partition computes other kernels again than the tags say.
        """
        joint, step, flow, turn = self.joint, self.joint.step, self.joint.step.flow, self.joint.step.turn
        number = {n.name: i for i, op in enumerate(step.ops) if op.kind is Kind.KERNELS for n in op.nodes}
        draws = {str((n.target, n.args)): n.name for n in flow.kernels if is_random(n)}
        order = list(range(turn + 1))
        for node in backward.graph.nodes:
            name = draws.get(str(torch_tags.replayed(node)), node.name)
            if node.op == "call_function" and name in number:  # what is saved has the name of its maker
                order.append(number[name])
        other = sorted(joint.names_of(op for op in order[turn + 1 :] if op < turn) - self.again)
        if other:
            names = ", ".join(other[:3])
            raise CaptureError(f"torch's partition computes what is tagged to be saved again: {names}: a bug in remat")
        order += sorted(set(range(len(step.ops))).difference(order))
        read = {s for op in order[turn + 1 :] for s in step.ops[op].reads}
        taken = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
        saved = {s for n, storages in flow.storages_of.items() if n.name in taken for s in storages}
        for_nothing = saved.intersection(s for op in step.ops[:turn] for s in op.makes) - read
        peak = joint.peak_of(order, {}) + sum(flow.sizes[s] for s in for_nothing)
        if peak > self.peak_bytes:
            log.warning(
                "torch's partition of the tagged graph needs %s, and %s were promised",
                readable(peak),
                readable(self.peak_bytes),
            )
        return peak


def tag(
    joint_graph: fx.GraphModule,
    budget: Budget,
    *,
    forward_outputs: int | None = None,
    planner: Planner | str | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TagFields],
) -> Tagged:
    """Tag every node of a joint graph, so that torch's min-cut partitioner saves and computes again as planned.

    Torch computes each value again once at most, just before its first use in the backward pass. Its cut has nothing
    left to decide. Equal nodes become one first, as the partitioner would make them. Batch normalization in training
    and what reads an overwritten input are saved, since torch cannot run them again.

    Args:
        joint_graph: of AOTAutograd; its nodes get tags, in place.
        budget: of the whole step, as for `remat.optimize`.
        forward_outputs: how many results are the forward pass's; by default, what is left by a gradient for each input.
        planner: as for `remat.optimize`. With "greedy" the tags are those of a greedy plan.
        options, fields: those of `remat.SolveOptions` that concern a plan. The method is "tags" unless one is named.

    Example:
        >>> from torch._functorch.aot_autograd import aot_export_joint_simple
        >>> step = lambda x, w: (((x @ w).tanh() @ w).tanh(),)
        >>> import torch
        >>> args = [torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)]
        >>> graph = aot_export_joint_simple(step, args, trace_joint=True)
        >>> tag(graph, "100%", planner="greedy").again
        frozenset()

    Raises:
        InvalidData: not a budget, a planner or an option.
        CaptureError: the graph cannot be planned; the message says why.
        BudgetTooSmall, NothingFound: no plan that torch can carry out fits.
    """
    asking = solve_options(tag, TagFields, options, fields)
    return tagged(joint_graph, budget, planner_of(planner, asking), asking, forward_outputs)


def tagged(
    module: fx.GraphModule,
    budget: Budget,
    planner: CoordinatedPlanner,
    asking: SolveOptions,
    forward_outputs: int | None = None,
    *,
    whole_step: bool = False,
) -> Tagged:
    """`tag` with a planner and options that have been read; `whole_step`: of a graph that torchtitan has traced."""
    if not whole_step:
        if not _compat.has_tangents(module.graph):
            raise CaptureError(
                "the graph has no tangents: it is no joint graph of AOTAutograd's, whose backward pass begins with "
                "them; torchtitan's graph trainer takes remat.tags.passes.GraphTrainerPass"
            )
        torch_tags.prepare(module)
    joint = joint_of(module, forward_outputs, planner.profiles, asking.functional_ops, whole_step)
    size = budget_bytes(budget, joint.graph, asking.slack)
    link = read_link(asking.link, asking.host_bytes)
    if link is None and asking.link is not None:
        raise InvalidData(
            "a traced step runs on no device yet: name the link, such as 'pcie5', or give a Link", "/link"
        )
    joint = replace(joint, graph=bounded(joint.graph, budget).with_link(link))
    if asking.method == "auto" and link is None:
        asking = replace(asking, method=METHOD)
    found = _planned(joint, budget, size, planner, asking)
    _write(module, found, whole_step)
    for note in notes(joint.step):
        log.info("%s", note)
    log.info(
        "tags: %d kernels are computed again, %d go to the host; %s",
        len(found.again), len(found.host), found.answer.message,
    )  # fmt: skip
    return found


def _planned(joint: Joint, budget: Budget, size: int, planner: CoordinatedPlanner, asking: SolveOptions) -> Tagged:
    """The cheapest plan found that torch carries out within a size, kernel by kernel: the answer's, or a greedy one.

    Raises:
        BudgetTooSmall, NothingFound: there is none.
    """
    answer = plan_or_raise(planner.plan(Problem(joint.graph, size), asking), joint.graph, budget)
    assert isinstance(answer.plan, Plan)
    first = _as_torch_runs_it(joint, size, answer, answer.plan)
    if first is not None and first.peak_bytes <= size:
        return first
    others = (plan for share in _SHARES for plan in greedy_plans(joint.graph, int(share * size)))
    found = [each for plan in others if (each := _as_torch_runs_it(joint, size, answer, plan)) is not None]
    fitting = [each for each in found if each.peak_bytes <= size]
    if fitting:
        return min(fitting, key=lambda each: each.answer.cost_ns or 0)
    peaks = [each.peak_bytes for each in (first, *found) if each is not None]
    enough = f"; {readable(min(peaks), up=True)} is enough" if peaks else ""
    raise NothingFound(
        f"no plan was found that torch carries out within {readable(size)}{enough}; a plan of "
        "remat.backend(budget=…) may fit",
        replace(answer, plan=None),
    )


def _as_torch_runs_it(joint: Joint, size: int, answer: Answer, plan: Plan) -> Tagged | None:
    """What a plan saves, computes again and moves, as torch carries it out; None where that runs an op again that must
    not run there.
    """
    graph = joint.graph
    ops = tags_of(graph, plan)
    ours = tagged_plan(graph, ops)
    try:
        cost, peak = verify(Problem(graph, _ANY), ours)
    except InvalidPlan:
        return None
    again, order = joint.names_of(ops), ours.computes
    away = _moved(joint, size, plan, again, order) if graph.link is not None and plan is answer.plan else {}
    if plan is not answer.plan or (ours != plan and not away):
        within = Problem(graph, max(answer.budget_bytes, peak))
        bound = None if answer.restricted_to or peak > answer.budget_bytes else answer.bound_ns
        found = Answer.of_plan(within, ours, method=METHOD, bound_ns=bound, seconds=answer.seconds)
        more = f"{100 * (cost / answer.cost_ns - 1):+.3g} % against that plan itself" if answer.cost_ns else "no cost"
        answer = replace(found, message=f"{answer.method}'s choice of what is saved, as torch runs it: {more}.")
    names = frozenset(stay.node.name for stay in away.values())
    return Tagged(answer, joint.peak_of(order, away), again, joint, names)


def _moved(joint: Joint, size: int, plan: Plan, again: Collection[str], order: Sequence[int]) -> dict[int, Stay]:
    """The storages that go to the host: those of a plan, and where the trainer's copies need more than a size, others
    that stay there for long, as far as the host has space.
    """
    graph, sizes = joint.graph, joint.step.sizes
    can = {storage: stay for storage, stay in stays(joint.step).items() if maker(stay.node).name not in again}
    planned = {joint.values[value] for value in away_between(graph, plan)}
    away = {storage: can[storage] for storage in sorted(planned & can.keys())}
    most = _ANY if graph.link is None or graph.link.host_bytes is None else graph.link.host_bytes
    for storage in sorted(can.keys() - away.keys(), key=lambda storage: can[storage].leaves - can[storage].returns):
        if joint.peak_of(order, away) <= size:
            break
        if sum(sizes[other] for other in (storage, *away)) <= most:
            away[storage] = can[storage]
    return away


def _write(module: fx.GraphModule, found: Tagged, whole_step: bool) -> None:
    """Tag every node that calls a function; of a whole step those of its forward pass, which its trainer wants.

    Views are computed again, at no cost. What the backward pass makes without tangents is computed there, as the plan
    has it, and not moved to the forward pass.
    """
    flow = found.joint.step.flow
    saved = {n.name for n in flow.kernels[: flow.forward_kernels]} - found.again
    for node in module.graph.nodes:
        if node.op == "call_function" and not (whole_step and torch_tags.is_backward(node)):
            policy = CheckpointPolicy.MUST_SAVE if maker(node).name in saved else CheckpointPolicy.MUST_RECOMPUTE
            torch_tags.write_tag(node, CheckpointPolicy.MUST_CPU_OFFLOAD if node.name in found.host else policy)
