"""`torch.compile(model, backend=remat.backend(budget=…, inner="inductor"))`: Inductor's kernels, remat's plans."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Self

from torch import fx

from remat_ir import Answer, Graph, InvalidData, Problem, readable

from ... import _compat
from ..._compat import inductor
from ..._compat.tags import Partitioner
from ...capture.dataflow import resident_bytes, tensors
from ...capture.operations import notes
from ...capture.refused import refuse_split_by_ddp
from ...planning.budget import Budget, budget_bytes
from ...planning.options import SolveOptions
from ...planning.planner import CoordinatedPlanner, FallbackPlanner, Planner
from ...planning.quick import quick_answer
from ...planning.sources import OnProgress
from ...profiling.collectives import with_collectives_once
from ...profiling.profile import device_kind
from ...switch import note_planned_call
from .joint import joint_of, note_layouts
from .regions import region_costs, region_graph, regions
from .replan import Carried, Search

log = logging.getLogger("remat")

MOST_KNOWN = 64
"""Graphs of a backend that are remembered; new sizes start from what was planned lately."""

FORMAT = 2
"""Of the cache keys; another number for another way of carrying out plans."""

NOT_WITH = {
    "cpp_wrapper": "the generated code's memory is read from Inductor's Python wrapper",
    "fallback_random": "random kernels of torch's own can be neither kept cheaply nor run again",
    "custom_partitioner_fn": "the plan takes its place",
    "triton.cudagraphs": "a CUDA graph keeps memory in a pool of its own, which no plan counts",
    "inductor_choices_class": "what is fused decides how much the plan's code holds",
}
"""Options of Inductor that plans cannot be carried out with, and why."""


class InductorBackend:
    """A backend for `torch.compile` that runs each training graph by a plan of its own, under Inductor's kernels.

    Attributes:
        carried: what was planned and compiled lately, in order, `MOST_KNOWN` at most; a graph from Inductor's caches
            has no entry.
    """

    def __init__(
        self,
        budget: Budget,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        options: Mapping[str, Any],
        on_progress: OnProgress | None = None,
    ) -> None:
        self.budget, self.asking, self.on_progress = budget, asking, on_progress
        self._given = self.planner = planner
        self._frames: set[int | None] = set()
        self._known_frame = False
        self.options = checked_options(options)
        self.carried: list[Carried] = []
        self._quick: list[Problem] = []
        self.asked = _planner_name(planner.asked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as `Backend`."""
        return self

    @property
    def answers(self) -> list[Answer]:
        """Those that the graphs compiled lately follow, in order."""
        return [each.answer for each in self.carried]

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that these are of."""
        return [each.graph for each in self.carried]

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls for each graph and each kind of input; the log tells of a part that is not the first.

        Raises:
            CaptureError: the graph cannot be planned under Inductor; the message says why.
            PlanningError: there is no plan whose generated code fits.
        """
        refuse_split_by_ddp()
        self.planner = self._given.here()
        frame = _compat.frame_number()
        self._known_frame = frame in self._frames
        if self._frames and not self._known_frame:
            log.warning(
                "torch.compile has split the model, or this backend serves two: each part is given the whole budget; "
                "use fullgraph=True and a backend a model"
            )
        self._frames.add(frame)
        self._quick = []
        function = inductor.compile_graph(
            module,
            example_inputs,
            _ByPlan(self),
            self.options,
            self._seen,
            # a rank that took its code from a cache would leave the others waiting for its word
            cached=not self.planner.coordinator.in_step,
            stored=lambda: not self._quick,
        )
        return _noted(function)

    def _ask(self, problem: Problem) -> Answer:
        """The planner's answer; for another kind of input to a known frame a quick one."""
        planner, asking = self.planner, self.asking
        with _compat.only_real_tensors():
            if not self._known_frame:
                return planner.plan(problem, asking, on_progress=self.on_progress)
            known = [(each.graph, each.answer) for each in self.carried]
            quick = planner.coordinator.answer(problem, lambda: quick_answer(problem, planner.asked, asking, known))
        if (quick.gap or 0) > asking.max_gap:
            self._quick.append(problem)
        return quick

    def _solve_for_later(self) -> None:
        """Have the planner solve what was answered quickly, for the next process that compiles it.

        Nothing takes over in this process: the kernels of another plan may round differently.
        """
        first_and_last = {id(p): p for p in (*self._quick[:1], *self._quick[-1:])}
        for problem in first_and_last.values():
            ask = functools.partial(self.planner.asked.plan, problem, self.asking, on_progress=self.on_progress)
            self.planner.coordinator.later(problem, ask)

    def _agreed(self, found: Sequence[int]) -> list[int]:
        """The most that any rank finds of each number."""
        with _compat.only_real_tensors():
            return self.planner.coordinator.most(found)

    def _seen(self, backward: bool, generated: inductor.Generated) -> None:
        if not self.carried:
            return
        carried = self.carried[-1]
        carried.compiled[backward] = generated
        if generated.estimate_bytes > carried.estimate_bytes[backward]:
            log.warning(
                "Inductor generated other code for the %s pass than when the plan was verified: its own estimate "
                "is %s in place of %s",
                "backward" if backward else "forward",
                readable(generated.estimate_bytes),
                readable(carried.estimate_bytes[backward]),
            )

    def key(self) -> str:
        """What a plan depends on beyond the graph, for the keys of Inductor's caches."""
        text: list[object] = [
            FORMAT,
            version("remat"),
            device_kind([]),
            repr(self.budget),
            self.asked,
            repr(self.asking),
        ]
        return hashlib.sha256(json.dumps(text).encode()).hexdigest()

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The joint graph as a forward and a backward graph that follow a verified plan whose code fits the budget."""
        plain = inductor.plain_code(joint, num_fwd_outputs, **options)
        noted = note_layouts(joint, plain)
        found = joint_of(joint, num_fwd_outputs, noted)
        functional = self.asking.functional_ops
        step = regions(found.flow, self.planner.coordinator.in_step, functional)
        # Inductor partitions under a fake mode, where a kernel measured would be a fake one
        with _compat.only_real_tensors():
            costs = region_costs(step, self.planner.profiles, functional)
        alone = {op.nodes[0]: cost for op, cost in costs.items() if len(op.nodes) == 1}
        step = with_collectives_once(step, alone, self.asking.recompute_collectives)
        graph = region_graph(step, costs, resident_bytes(found.flow))
        budget = budget_bytes(self.budget, graph, self.asking.slack)
        search = Search(
            found,
            step,
            graph,
            num_fwd_outputs,
            budget,
            self._ask,
            self.planner.profiles,
            self._agreed,
            plain.kernels,
            functional,
        )
        carried = search.run()
        self._solve_for_later()
        for note in notes(step):
            log.info("%s", note)
        self.carried.append(carried)
        del self.carried[:-MOST_KNOWN]
        return carried.forward, carried.backward


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph whose calls count as planned where they give gradients; without, it has no plan."""

    def run(*inputs: Any) -> Any:
        output = function(*inputs)
        if any(tensor.requires_grad for tensor in tensors(output)):
            note_planned_call()
        return output

    return run


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of Inductor that plans can be carried out with.

    Raises:
        InvalidData: one that they cannot; the message says why.
    """
    for name, reason in NOT_WITH.items():
        if options.get(name):
            raise InvalidData(f"the option {name} does not go with inner='inductor': {reason}")
        if name not in options and name != "custom_partitioner_fn" and attrgetter(name)(inductor.config):
            raise InvalidData(f"torch._inductor.config.{name} does not go with inner='inductor': {reason}")
    return dict(options)


def _planner_name(planner: Planner) -> list[str]:
    """Who is asked, by name; a planner of the caller's own is never taken for another."""
    if isinstance(planner, FallbackPlanner):
        return [name for one in planner.planners for name in _planner_name(one)]
    name = f"{type(planner).__module__}.{type(planner).__qualname__}"
    return [name if name.startswith("remat.") else f"{name} {secrets.token_hex(8)}"]


class _ByPlan(Partitioner):
    """A backend's partition; its key is that of what is asked of the backend now."""

    def __init__(self, backend: InductorBackend) -> None:
        self._backend, self.key = backend, backend.key()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **given: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._backend.partition(gm, joint_inputs, **given)
