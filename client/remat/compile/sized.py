"""A backend for `torch.compile` with dynamic sizes: each graph is planned at the sizes that its calls have."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import torch
from torch import fx

from remat_ir import Answer, Graph, InvalidPlan, Plan, Problem, verify

from .. import _compat
from ..capture.dataflow import dataflow, device_of
from ..capture.group import groups
from ..capture.operations import Operations, notes, operations, to_graph
from ..capture.outstanding import Outstanding
from ..capture.trace import refuse
from ..distributed.refused import refuse_split_by_ddp
from ..errors import CaptureError
from ..lowering.codegen import boxed_function
from ..lowering.link_profile import link_for
from ..lowering.lower import lower
from ..lowering.traced import checked_function
from ..planning.budget import Budget, Fraction, budget_bytes
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner, plan_or_raise
from ..planning.quick import Better, improved, quick_answer
from ..planning.sources import OnProgress
from ..profiling.collectives import with_collectives_once
from ..profiling.profile import profile_kernels
from .eager import resident_bytes
from .numbers import Counted, read_as_numbers, with_constants

log = logging.getLogger("remat")

Run: TypeAlias = Callable[..., Any]
Sizes: TypeAlias = tuple[Any, ...]


@dataclass(eq=False)
class PlannedSizes:
    """One graph of Dynamo's at one set of sizes: what was traced, once, and the plan that it runs by.

    Attributes:
        graph: what was planned.
        answer: the one that `run` follows.
        run: takes the inputs of Dynamo's graph.
        better: a better answer that is still looked for, and what is made of it in the caller's thread.
        outstanding: its calls that may run again, which need the plan that they began with.
    """

    graph: Graph
    answer: Answer
    run: Run = field(repr=False)
    better: Better[tuple[Run, Answer]] | None = field(repr=False)
    outstanding: Outstanding = field(default_factory=Outstanding, repr=False)

    def take_over(self) -> None:
        """Run by the better plan from now on, if it has come; a call that has begun ends by the plan it began with."""
        if self.better is None:
            return
        found = self.better.take(self.outstanding.may_change())
        if found is not None:
            self.run, self.answer = found
            log.info("a better plan takes over: %s ns", self.answer.cost_ns)
        if self.better.over:
            self.better = None  # holds the traced graph

    def __call__(self, *inputs: Any) -> Any:
        """One forward pass by the plan."""
        results = self.run(*inputs)
        if self.better is not None:
            self.outstanding.note(results)
        return results


class SizedBackend:
    """A backend for `torch.compile` whose graphs have a plan for each set of sizes that they are called with.

    Dynamo may make sizes symbols: a new one is then traced from Dynamo's graph, and no code of the model runs again.

    Attributes:
        graphs: Dynamo's graphs that have been compiled.
    """

    def __init__(
        self,
        budget: Budget,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.budget, self.given, self.asking, self.on_progress = budget, planner, asking, on_progress
        self.graphs: list[SizedGraph] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as `Backend`."""
        return self

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Run:
        """What Dynamo calls for each graph.

        Raises:
            CaptureError: it is one of DistributedDataParallel's buckets.
        """
        refuse_split_by_ddp()
        made = SizedGraph(self, module)
        frames = {graph.frame for graph in self.graphs}
        if frames and made.frame not in frames:
            log.warning("torch.compile has split the model, or this backend serves two: each part has the whole budget")
        self.graphs.append(made)
        return made

    @property
    def planned(self) -> list[PlannedSizes]:
        """All that has a plan now."""
        return [each for graph in self.graphs for each in graph.made.values() if each is not None]


class SizedGraph:
    """One graph of Dynamo's, and its plans by sizes; at most `most_plans`, the ones used last."""

    def __init__(self, backend: SizedBackend, module: fx.GraphModule) -> None:
        self._backend, self.frame = backend, _compat.frame_number()
        self._counted = Counted(module)
        self._module = self._counted.rest
        counted = self._counted.inputs
        inputs = module.graph.find_nodes(op="placeholder")
        self._varying = tuple(
            i for i, given in enumerate(inputs) if i not in counted and _varies(_compat.example_of(given))
        )
        self._numbers = read_as_numbers(module)
        self._writes: bool | None = None
        self._lock = threading.RLock()
        self._state = [*module.parameters(), *module.buffers()]
        self.made: OrderedDict[Sizes, PlannedSizes | None] = OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        """The graph by the plan of its sizes; as Dynamo captured it where there is nothing to train."""
        found = None
        if torch.is_grad_enabled():
            with self._lock:
                found = self._found(inputs)
                if found is not None:
                    found.take_over()
        results = self._module(*inputs) if found is None else found(*self._state, *inputs)
        return self._counted.results(inputs, results)

    def _found(self, inputs: Sequence[Any]) -> PlannedSizes | None:
        sizes = self._sizes(inputs)
        if sizes not in self.made:
            planned = self._planned(inputs)
            sizes = self._sizes(inputs)  # fewer of them count where the graph turned out to overwrite no input
            self.made[sizes] = planned
            if len(self.made) > self._backend.asking.most_plans:
                self.made.popitem(last=False)
        self.made.move_to_end(sizes)
        return self.made[sizes]

    def _sizes(self, inputs: Sequence[Any]) -> Sizes:
        """What tells plans of one graph apart: all else is checked by Dynamo's guards."""
        found = tuple(_size(inputs[i]) for i in self._varying)
        found += tuple(inputs[i].item() for i in self._numbers)
        return found if self._writes is False else (*found, _shared(inputs))

    def _planned(self, inputs: Sequence[Any]) -> PlannedSizes | None:
        """Trace and plan the graph at the sizes of a call; None where it runs without a plan.

        Raises:
            CaptureError: it cannot be planned, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        try:
            with ExitStack() as stack:
                stack.enter_context(_compat.traced_alone())
                numbers = {i: inputs[i].item() for i in self._numbers}
                module = with_constants(self._module, numbers) if numbers else self._module
                descriptor = _compat.export_joint(stack, module, inputs, {})
                joint = _compat.joint_graph(descriptor)
                self._writes = bool(_compat.updated_inputs(joint.graph))
                if not _compat.has_tangents(joint.graph):
                    return None
                refuse(joint)
                return self._solved(descriptor, joint)
        except CaptureError as error:
            if self._backend.asking.on_failure == "raise":
                raise
            log.warning("a part of the model runs without a plan: %s", error)
            return None

    def _solved(self, descriptor: Any, joint: fx.GraphModule) -> PlannedSizes:
        backend, asking = self._backend, self._backend.asking
        planner = backend.given.here()
        flow = dataflow(joint, _compat.forward_outputs(descriptor))
        functional = asking.functional_ops
        step = operations(flow, groups(flow), one_plan=planner.coordinator.in_step, functional=functional)
        with _compat.only_real_tensors():
            profiled = profile_kernels(flow.kernels, planner.profiles, functional=functional)
            step = with_collectives_once(step, profiled.kernels, asking.recompute_collectives)
            graph, _ = to_graph(step, profiled.kernels, resident_bytes(flow))
            link = link_for(asking, device_of(flow), planner.coordinator)
            graph = graph if link is None else replace(graph, link=link)
            problem = Problem(graph, max(budget_bytes(backend.budget, graph, asking.slack), self._allowed(graph)))
            answer, may_improve = self._asked(problem, planner)
        for note in notes(step):
            log.info("%s", note)

        def compiled(answer: Answer) -> tuple[Run, Answer]:
            return by_plan(descriptor, step, problem, answer), answer

        run, _ = compiled(answer)
        better = improved(problem, planner, asking, answer, compiled, backend.on_progress) if may_improve else None
        return PlannedSizes(graph, answer, run, better)

    def _allowed(self, graph: Graph) -> int:
        """What a share of an earlier, larger call came to: the last, smaller batch of an epoch may use as much."""
        if not isinstance(self._backend.budget, Fraction):
            return 0
        alike = (each for other in self._backend.graphs if other.frame == self.frame for each in other.made.values())
        earlier = (each.answer.budget_bytes - each.graph.fixed_bytes for each in alike if each is not None)
        return graph.fixed_bytes + max(earlier, default=0)

    def _asked(self, problem: Problem, planner: CoordinatedPlanner) -> tuple[Answer, bool]:
        """An answer, and whether a better one may come: at further sizes, and without `wait`, it is a quick one.

        Raises:
            PlanningError: there is no plan.
        """
        backend, asking = self._backend, self._backend.asking
        known = [(each.graph, each.answer) for each in backend.planned]
        if asking.wait and not known:
            return plan_or_raise(planner.plan(problem, asking, on_progress=backend.on_progress)), False
        quick = planner.coordinator.answer(problem, lambda: quick_answer(problem, planner.asked, asking, known))
        return plan_or_raise(quick), (quick.gap or 0) > asking.max_gap


def by_plan(descriptor: Any, step: Operations, problem: Problem, answer: Answer) -> Run:
    """What runs a traced step by a plan: one trace serves for any number of plans.

    Raises:
        InvalidPlan: it is not a plan of this problem, or not what the answer says.
    """
    if not isinstance(answer.plan, Plan):
        raise InvalidPlan(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
    verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    lowered = lower(step, answer.plan)
    with _compat.traced_alone(), _compat.only_real_tensors():
        return _compat.compile_joint(
            descriptor,
            lambda *_, **__: (lowered.forward, lowered.backward),
            checked_function,
            lambda graph, _: boxed_function(graph),
        )


def _varies(example: Any) -> bool:
    """Whether Dynamo left the sizes of an input, or the input itself, open."""
    if isinstance(example, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*example.shape, *example.stride()))
    return isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool)


def _size(given: Any) -> Any:
    return (given.shape, given.stride()) if isinstance(given, torch.Tensor) else given


def _shared(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Which inputs share memory, and where they lie in it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i, given in enumerate(inputs):
        if isinstance(given, torch.Tensor):
            found.setdefault(_compat.storage_key(given), []).append((i, int(given.storage_offset())))
    return tuple(tuple(places) for places in found.values() if len(places) > 1)
