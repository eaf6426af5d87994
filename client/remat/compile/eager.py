"""`torch.compile(model, backend=remat.backend(budget=…))`: Dynamo's front end and guards, remat's plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeAlias

from torch import fx

from remat_ir import Answer, Graph, Plan, Problem, verify

from .. import _compat
from ..capture.dataflow import Dataflow, dataflow, device_of, tensors
from ..capture.group import groups
from ..capture.operations import notes, operations, to_graph
from ..capture.outstanding import Outstanding
from ..capture.trace import refuse
from ..distributed.refused import refuse_split_by_ddp
from ..errors import CaptureError
from ..lowering.codegen import boxed_function
from ..lowering.link_profile import link_for
from ..lowering.lower import lower
from ..lowering.traced import checked_function
from ..planning.budget import Budget, budget_bytes
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner, plan_or_raise
from ..planning.quick import Better, improved, quick_answer
from ..planning.sizes import Known
from ..planning.sources import OnProgress
from ..profiling.collectives import with_collectives_once
from ..profiling.profile import profile_kernels
from ..switch import note_planned_call

log = logging.getLogger("remat")

MOST_KNOWN = 64
"""Graphs of a backend that are remembered; new sizes start from what was planned lately."""
Make: TypeAlias = Callable[[Answer], Callable[..., Any] | None]


class Backend:
    """A backend for `torch.compile` that runs each training graph by a plan of its own.

    Attributes:
        answers: the answers that the graphs compiled lately follow, in order, `MOST_KNOWN` at most; a better plan of a
            graph comes as one more.
        graphs: the graphs that these are of.
    """

    def __init__(
        self,
        budget: Budget,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.budget, self.asking, self.on_progress = budget, asking, on_progress
        self._given = self.planner = planner
        self.answers: list[Answer] = []
        self.graphs: list[Graph] = []
        self._frames: set[int | None] = set()
        self._known_frame = False
        self._chosen: Answer | None = None
        self._better: Callable[[Make], Better[Callable[..., Any]]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: Lightning copies what `torch.compile` is given, and a planner's locks and threads have no copies."""
        return self

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls for each graph and each kind of input.

        Raises:
            CaptureError: the graph cannot be planned; the message says why.
            PlanningError: there is no plan.
        """
        self.note_frame()
        compiled = _compat.aot_backend(self.partition, checked_function, lambda graph, _: boxed_function(graph))
        function: Callable[..., Any] = compiled(module, example_inputs)
        ask = self._better
        if ask is None:
            return noted(function)

        def by_plan(answer: Answer, inputs: Sequence[Any]) -> Callable[..., Any]:
            self._chosen = answer
            try:
                with _compat.no_function_modes():
                    again: Callable[..., Any] = compiled(module, inputs)
            finally:
                self._chosen = None
            return again

        return noted(Replaced(function, ask, by_plan))

    def note_frame(self) -> None:
        """Say so in the log where Dynamo compiles a part of a model that is not the first.

        Raises:
            CaptureError: the part is one of DistributedDataParallel's buckets.
        """
        refuse_split_by_ddp()
        self._better = None
        self.planner = self._given.here()
        frame = _compat.frame_number()
        self._known_frame = frame in self._frames
        if self._frames and not self._known_frame:
            log.warning(
                "torch.compile has split the model, or this backend serves two: each part is given the whole budget; "
                "use fullgraph=True and a backend a model"
            )
        self._frames.add(frame)

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **unused: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """An AOTAutograd partition: the joint graph as a forward and a backward graph that follow a verified plan."""
        refuse(joint)
        flow = dataflow(joint, num_fwd_outputs)
        functional = self.asking.functional_ops
        step = operations(flow, groups(flow), one_plan=self.planner.coordinator.in_step, functional=functional)
        # AOTAutograd partitions under its fake mode, where a kernel measured would be a fake one
        with _compat.only_real_tensors():
            profiled = profile_kernels(flow.kernels, self.planner.profiles, functional=functional)
            step = with_collectives_once(step, profiled.kernels, self.asking.recompute_collectives)
            graph, _ = to_graph(step, profiled.kernels, resident_bytes(flow))
            link = link_for(self.asking, device_of(flow), self.planner.coordinator)
            graph = graph if link is None else replace(graph, link=link)
            problem = Problem(graph, budget_bytes(self.budget, graph, self.asking.slack))
            answer = self._chosen or plan_or_raise(self._ask(problem))
        if not isinstance(answer.plan, Plan):
            raise CaptureError(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        for note in notes(step):
            log.info("%s", note)
        lowered = lower(step, answer.plan)
        self.remember(answer, graph)
        return lowered.forward, lowered.backward

    def _ask(self, problem: Problem) -> Answer:
        """The planner's answer; for another kind of input to a known frame a quick one, with the planner's to come."""
        planner, asking = self.planner, self.asking
        if not self._known_frame:
            return planner.plan(problem, asking, on_progress=self.on_progress)
        known = self.known()
        quick = planner.coordinator.answer(problem, lambda: quick_answer(problem, planner.asked, asking, known))
        if quick.plan is not None and (quick.gap or 0) > asking.max_gap:
            self._better = partial(improved, problem, planner, asking, quick, on_progress=self.on_progress)
        return quick

    def remember(self, answer: Answer, graph: Graph) -> None:
        """Note what was planned, and drop what was long ago."""
        self.answers.append(answer)
        self.graphs.append(graph)
        del self.answers[:-MOST_KNOWN], self.graphs[:-MOST_KNOWN]

    def known(self) -> list[Known]:
        """What was planned lately, the latest last."""
        return list(zip(self.graphs, self.answers, strict=True))


class Replaced:
    """A compiled graph that is compiled again for a better plan, once there is one: at the start of a step.

    A step that has begun ends by what it began with: each compilation has a backward pass of its own.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        ask: Callable[[Make], Better[Callable[..., Any]]],
        by_plan: Callable[[Answer, Sequence[Any]], Callable[..., Any]],
    ) -> None:
        self._function = function
        self._inputs: Sequence[Any] = ()
        self._better: Better[Callable[..., Any]] | None = ask(lambda answer: by_plan(answer, self._inputs))
        self._outstanding = Outstanding()

    def __call__(self, *inputs: Any) -> Any:
        """The graph by the best plan so far."""
        better = self._better
        if better is None:
            return self._function(*inputs)
        self._inputs = inputs
        try:
            found = better.take(self._outstanding.may_change())
        finally:
            self._inputs = ()
        if found is not None:
            log.info("a better plan takes over")
            self._function = found
        if better.over:
            self._better = None
        output = self._function(*inputs)
        self._outstanding.note(output)
        return output


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph whose calls count as planned where they give gradients; without, it has no plan."""

    def run(*inputs: Any) -> Any:
        output = function(*inputs)
        if any(tensor.requires_grad for tensor in tensors(output)):
            note_planned_call()
        return output

    return run


def resident_bytes(flow: Dataflow) -> int:
    """Bytes of the parameters, buffers and inputs that a joint graph takes, each storage once."""
    found = {s for primal in flow.primals for s in flow.storages_of.get(primal, ())}
    return sum(flow.sizes[s] for s in found)
