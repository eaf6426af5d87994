"""A backend for `torch.compile` with torch's own kernels: each graph is planned at the sizes that its calls have."""

from __future__ import annotations

import logging
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeAlias

import torch
from torch import fx

from remat_ir import Answer, Graph, InvalidPlan, Plan, Problem, checkpointed, verify

from .. import _compat
from ..capture.dataflow import dataflow, device_of, resident_bytes
from ..capture.group import groups, groups_like
from ..capture.operations import notes, operations, to_graph
from ..capture.refused import refuse, refuse_split_by_ddp
from ..capture.symbolic import JointTraces
from ..errors import BudgetTooSmall, CaptureError
from ..lowering.link import link_for
from ..planning.budget import Budget, Fraction, budget_bytes
from ..planning.options import SolveOptions
from ..planning.phases import doing
from ..planning.planner import CoordinatedPlanner, plan_or_raise
from ..planning.quick import improved, quick_answer
from ..planning.sources import OnProgress
from ..profiling.collectives import with_collectives_once
from ..profiling.profile import profile_kernels
from ..switch import note_planned_call
from .plans import UNBOUNDED, PlannedSizes, Run, Step, Traced
from .rewrite import Counted, divided, inlined, read_as_numbers, with_constants
from .shared import Division, SharedBudget

log = logging.getLogger("remat")

MOST_KNOWN = 64
"""Plans of other sizes that a new one may start from."""

MANY_SIZES = 12
"""Plans of one graph at which the log says once how to have fewer."""

MANY = (
    "a graph has been planned at %s sizes by now, and each of them was a plan to wait for: where they are lengths of "
    "batches, pad these to a few, which remat.batch.buckets.Buckets.of finds"
)

MOST_CONSTANTS = 4
"""Sets of Python floats of a graph, each of which has a trace with symbols of its own."""

Sizes: TypeAlias = tuple[object, ...]


_THREAD = threading.local()
"""`ahead`, where it is set: this thread makes a call up to its first graph alone, to plan that."""


class PlannedAhead(Exception):
    """A graph has been planned for a call that is not to run.

    Attributes:
        found: the plan; None: the graph runs without one.
        draws: whether the code before the graph has drawn numbers of Python's.
    """

    def __init__(self, found: PlannedSizes | None, draws: bool) -> None:
        super().__init__("planned ahead")
        self.found, self.draws = found, draws


def planned_ahead(call: Callable[[], object]) -> PlannedSizes | None:
    """Make a call up to its first graph, which is planned and does not run; calls of other threads run meanwhile.

    None: that graph has no plan, or the call has come to its end without a graph.

    Raises:
        CaptureError, PlanningError: it cannot be planned.
    """
    before = random.getstate()
    _THREAD.ahead = True
    try:
        call()
    except PlannedAhead as planned:
        if planned.draws:
            random.setstate(before)
        return planned.found
    finally:
        _THREAD.ahead = False
    return None


def is_ahead() -> bool:
    """Whether this thread makes a call to plan it alone."""
    return bool(getattr(_THREAD, "ahead", False))


class Backend:
    """A backend for `torch.compile` whose graphs have a plan for each set of sizes that they are called with.

    Dynamo may make sizes symbols: a new one is then traced from Dynamo's graph, and no code of the model runs again.

    Args:
        shared: the budget, where other backends have it as well.
        of: what it compiles; None: anything.

    Attributes:
        calls: how many calls of its graphs have run by a plan.
    """

    calls = 0

    def __init__(
        self,
        budget: Budget,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        on_progress: OnProgress | None = None,
        shared: SharedBudget | None = None,
        of: object = None,
    ) -> None:
        self.budget, self.given, self.asking, self.on_progress = budget, planner, asking, on_progress
        self._graphs: list[weakref.ref[SizedGraph]] = []
        self.shared = shared or SharedBudget(budget, planner, asking)
        self.shared.backends[self if of is None else of] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: Lightning copies what `torch.compile` is given, and a planner's locks and threads have no copies."""
        return self

    @property
    def graphs(self) -> list[SizedGraph]:
        """Dynamo's graphs that have been compiled, in order; not those that it has dropped with their models."""
        found = [(reference, graph) for reference in self._graphs if (graph := reference()) is not None]
        self._graphs = [reference for reference, _ in found]
        return [graph for _, graph in found]

    @property
    def answers(self) -> list[Answer]:
        """Those that the graphs' plans follow now; of a step with several calls, those of the graphs."""
        return [each.answer for each in self.planned]

    @property
    def division(self) -> Division | None:
        """What each call of a step with several got of the budget; None where it has not been divided."""
        return self.shared.division

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[object]) -> Run:
        """What Dynamo calls for each graph.

        Raises:
            CaptureError: it is one of DistributedDataParallel's buckets.
        """
        refuse_split_by_ddp()
        reason = getattr(module, "compile_subgraph_reason", None)
        if getattr(reason, "graph_break", False):
            self.shared.share()
        self.shared.watching.compiling()
        parts = None if self.asking.on_failure == "raise" else divided(module, self._sized)
        if parts is None:
            return self._sized(module)
        self.shared.share()
        return parts

    def _sized(self, module: fx.GraphModule) -> SizedGraph:
        made = SizedGraph(self, module)
        self._graphs.append(weakref.ref(made))
        return made

    @property
    def takes_parts(self) -> bool:
        """Whether a share of one graph may be too small, since it may be a part of what the share is of."""
        return isinstance(self.budget, Fraction)

    def state(self) -> Sizes:
        """What tells plans apart besides the sizes and numbers of a call."""
        return ()

    def solve(self, graph: SizedGraph, traced: Traced) -> PlannedSizes:
        """A plan of what was traced of a graph at the sizes of a call, and what runs it.

        Raises:
            CaptureError, PlanningError: there is none.
            InvalidPlan: what is given is not a plan of this problem, or not what the answer says.
        """
        planner = self.given.here()
        step = self._priced(graph, traced, planner)
        allowed = max(budget_bytes(self.budget, step.graph, self.asking.slack), self._allowed(graph, step.graph))
        problem = Problem(step.graph, allowed)
        answer, may_improve = self._asked(graph, problem, planner)

        def compiled(answer: Answer) -> tuple[Run, Answer]:
            if not isinstance(answer.plan, Plan):
                raise InvalidPlan(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
            verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
            return step.compile(answer.plan), answer

        run, _ = compiled(answer)
        better = improved(problem, planner, self.asking, answer, compiled, self.on_progress) if may_improve else None
        return PlannedSizes(step.graph, answer, run, better, priced=step)

    def least(self, graph: SizedGraph, traced: Traced) -> PlannedSizes:
        """As `solve` for a step of several calls: by the plan that holds least, until the budget is divided; no planner
        is asked."""
        step = self._priced(graph, traced, self.given.here())
        problem = Problem(step.graph, UNBOUNDED)
        answer = Answer.of_plan(problem, checkpointed(step.graph), method="greedy")
        found: PlannedSizes

        def run(*inputs: Any) -> Any:
            return found.by(found.least)(*inputs)

        found = PlannedSizes(step.graph, answer, run, None, priced=step)
        return found

    def _priced(self, graph: SizedGraph, traced: Traced, planner: CoordinatedPlanner) -> Step:
        asking = self.asking
        flow = dataflow(traced.joint, traced.forward_outputs)
        functional, known = asking.functional_ops, [each.priced for each in graph.of_this_frame()]
        found = (groups_like(flow, known[-1].operations) if known else None) or groups(flow)
        step = operations(flow, found, one_plan=planner.coordinator.in_step, functional=functional)
        sizes = [each.profiled for each in known]
        profiled = profile_kernels(flow.kernels, planner.profiles, sizes, functional=functional)
        step = with_collectives_once(step, profiled.kernels, asking.recompute_collectives)
        posed, _ = to_graph(step, profiled.kernels, resident_bytes(flow))
        link = link_for(asking, device_of(flow), planner.coordinator)
        for note in notes(step):
            log.info("%s", note)
        traced, step, profiled = traced.priced(step, profiled)
        return Step(traced, step, posed if link is None else replace(posed, link=link), profiled)

    def _allowed(self, graph: SizedGraph, posed: Graph) -> int:
        """What a share of an earlier, larger call came to: the last, smaller batch of an epoch may use as much."""
        if not isinstance(self.budget, Fraction):
            return 0
        earlier = (each.answer.budget_bytes - each.graph.fixed_bytes for each in graph.of_this_frame())
        return posed.fixed_bytes + max(earlier, default=0)

    def _asked(self, graph: SizedGraph, problem: Problem, planner: CoordinatedPlanner) -> tuple[Answer, bool]:
        """An answer, and whether a better one may come: at further sizes, and without `wait`, it is a quick one.

        Raises:
            PlanningError: there is no plan.
        """
        asking = self.asking
        if asking.wait and not graph.of_this_frame():
            return plan_or_raise(planner.plan(problem, asking, on_progress=self.on_progress)), False
        known = [(each.graph, each.answer) for each in self.planned[-MOST_KNOWN:]]
        quick = planner.coordinator.answer(problem, lambda: quick_answer(problem, planner.asked, asking, known))
        return plan_or_raise(quick), (quick.gap or 0) > asking.max_gap

    @property
    def planned(self) -> list[PlannedSizes]:
        """All that has a plan now."""
        return [each for graph in self.graphs for each in graph.made.values() if each is not None]


class SizedGraph:
    """One graph of Dynamo's, and its plans by sizes; at most `most_plans`, the ones used last."""

    def __init__(self, backend: Backend, module: fx.GraphModule) -> None:
        self._backend, self.frame = backend, _compat.frame_number()
        self.draws = _compat.draws_numbers()
        self._counted = Counted(inlined(module))
        self._module = self._counted.rest
        counted = self._counted.inputs
        inputs = module.graph.find_nodes(op="placeholder")
        self._varying = tuple(
            i for i, given in enumerate(inputs) if i not in counted and _varies(_compat.example_of(given))
        )
        self._numbers = read_as_numbers(module)
        self._traces: OrderedDict[Sizes, JointTraces] = OrderedDict()
        self._writes: bool | None = None
        self._said, self._sizes_planned = False, 0
        self._lock = threading.RLock()
        self._state = [*module.parameters(), *module.buffers()]
        self.made: OrderedDict[Sizes, PlannedSizes | None] = OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        """The graph by the plan of its sizes; as Dynamo captured it where there is nothing to train."""
        found, shared = None, self._backend.shared
        if torch.is_grad_enabled():
            shared.begin()
            with self._lock:
                found = self._found(inputs)
                if found is not None and not shared.several:
                    found.take_over()
                if is_ahead():
                    raise PlannedAhead(found, self.draws)
        else:
            shared.rest()
        if found is None:
            return self._counted.results(inputs, self._module(*inputs))
        self._backend.calls += 1
        note_planned_call()  # before it: a checkpoint ends the second run of its part by an exception
        results = shared.run(found, [*self._state, *inputs])
        if found.failed:  # in this call
            self._backend.calls -= 1
            note_planned_call(-1)
        return self._counted.results(inputs, results)

    def _found(self, inputs: Sequence[Any]) -> PlannedSizes | None:
        sizes = self._sizes(inputs)
        if sizes not in self.made:
            self._backend.shared.watching.compiling()
            planned = self._planned(inputs)
            sizes = self._sizes(inputs)  # fewer of them count where the graph turned out to overwrite no input
            self.made[sizes] = planned
            self._sizes_planned += planned is not None
            if self._sizes_planned == MANY_SIZES and planned is not None:
                log.warning(MANY, MANY_SIZES)
            if len(self.made) > self._backend.asking.most_plans:
                self.made.popitem(last=False)
        self.made.move_to_end(sizes)
        made = self.made[sizes]
        return None if made is None or made.failed else made

    def _sizes(self, inputs: Sequence[Any]) -> Sizes:
        """What tells plans of one graph apart: all else is checked by Dynamo's guards."""
        found = tuple(_size(inputs[i]) for i in self._varying)
        found += tuple(inputs[i].item() for i in self._numbers)
        found += self._backend.state()
        return found if self._writes is False else (*found, _shared(inputs))

    def _planned(self, inputs: Sequence[Any]) -> PlannedSizes | None:
        """Trace and plan the graph at the sizes of a call; None where it runs without a plan.

        Raises:
            CaptureError: it cannot be planned, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        try:
            with doing("capturing and planning a graph of the model"), _compat.traced_alone():
                found = self._traces_of(inputs).at(inputs)
                self._writes = bool(_compat.updated_inputs(found.joint.graph))
                if not _compat.has_tangents(found.joint.graph):
                    return None
                refuse(found.joint)
                shared = self._backend.shared
                if not shared.several and shared.calls.outstanding() and not _compat.saved_tensors_have_hooks():
                    shared.share()
                with _compat.only_real_tensors():  # ranks speak here
                    traced = Traced(**vars(found), module=self._module, inputs=[*self._state, *inputs])
                    planned = self._solved_or_least(traced)
                shared.watching.device = device_of(planned.priced.operations.flow)
                return planned
        except CaptureError as error:
            if self._backend.asking.on_failure == "raise":
                raise
            level = logging.INFO if self._said else logging.WARNING  # of one graph once, whatever its sizes
            log.log(level, "a part of the model runs without a plan: %s", error)
            self._said = True
            return None

    def _traces_of(self, inputs: Sequence[Any]) -> JointTraces:
        """The traces of the graph with the numbers that it reads from tensors: they are constants of a trace."""
        numbers = {i: inputs[i].item() for i in self._numbers}
        key = tuple(numbers.values())
        if key not in self._traces:
            self._traces[key] = JointTraces(with_constants(self._module, numbers) if numbers else self._module)
            if len(self._traces) > MOST_CONSTANTS:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return self._traces[key]

    def _solved_or_least(self, traced: Traced) -> PlannedSizes:
        """A plan for the whole budget; where that is one of several calls, the one that holds least.

        Raises:
            CaptureError: it cannot be planned.
            PlanningError: there is no plan.
        """
        shared = self._backend.shared
        if not shared.several:
            try:
                return self._backend.solve(self, traced)
            except BudgetTooSmall as error:
                if not self._backend.takes_parts:
                    raise
                log.info("a share of this graph alone is too small, that of a step may not be: %s", error)
                shared.share()
        return self._backend.least(self, traced)

    def of_this_frame(self) -> list[PlannedSizes]:
        """What is planned of the same code."""
        alike = (each for other in self._backend.graphs if other.frame == self.frame for each in other.made.values())
        return [each for each in alike if each is not None]


def _varies(example: object) -> bool:
    """Whether Dynamo left the sizes of an input, or the input itself, open."""
    if isinstance(example, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*example.shape, *example.stride()))
    return isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool)


def _size(given: object) -> object:
    return (given.shape, given.stride()) if isinstance(given, torch.Tensor) else given


def _shared(inputs: Sequence[object]) -> Sizes:
    """Which inputs share memory, and where they lie in it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i, given in enumerate(inputs):
        if isinstance(given, torch.Tensor):
            found.setdefault(_compat.storage_key(given), []).append((i, int(given.storage_offset())))
    return tuple(tuple(places) for places in found.values() if len(places) > 1)
