"""One stage of a pipeline, planned next to the others of its rank, and a step watched from pass to pass."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from remat_ir import Answer, Plan, checkpointed

from ..compile.plans import UNBOUNDED, Traced, unit_problem
from ..device import Interval, of
from ..errors import CaptureError
from ..planning.budget import UnitBytes
from ..planning.options import SolveOptions
from ..planning.phases import Phases
from ..planning.planner import CoordinatedPlanner
from ..training.backward import Halves
from ..training.enable import install, refuse_enabled
from ..training.job import Job
from ..training.optimize import carry_out, planned_step, profiled_step
from ..training.step import Planned, TrainingStep
from ..training.traced import TrainingBackend


class Stage:
    """One stage: first it runs by the plan that holds least, then within what it was given.

    Args:
        halves: runs the second halves of its backward passes; None: they are whole.

    Attributes:
        size: within which calls of other sizes than the trial's are planned; None: nothing is picked yet.
        failed: why it could not be captured.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        halves: Halves | None = None,
    ) -> None:
        self.name, self.module, self.halves = name, module, halves
        self.step: TrainingStep | None = None
        self.size: UnitBytes | None = None
        self.failed: CaptureError | None = None
        self.first: Planned
        self._planner, self._asking = planner, asking
        refuse_enabled(module)
        options = replace(asking, self_check=False, on_failure="plain")
        self.carrier = install(module, lambda model: TrainingBackend(model, self._make_plan, planner, options))

    def _make_plan(self, model: nn.Module, traced: Traced, known: Sequence[Planned]) -> Planned:
        with Phases(lambda _: None) as phases:
            if self.size is not None:
                job = Job()
                given = self._planner, self._asking, job, known, phases
                step = profiled_step(model, traced, *given, halves=self.halves)
                return planned_step(step, model, self.size, *given)
            try:
                if self.step is not None and self.carrier.backend.trained:
                    raise CaptureError(self._twice)
                self.step = profiled_step(
                    model, traced, self._planner, self._asking, None, (), phases, halves=self.halves
                )
                self.first = self.carried_out(UnitBytes(UNBOUNDED // 4, UNBOUNDED // 4), checkpointed(self.step.graph))
            except CaptureError as error:
                self.failed = error
                raise
            return self.first

    def carried_out(self, size: UnitBytes, plan: Plan) -> Planned:
        """A plan of it within its bounds, verified; compiled in the stage's next call, under the state there."""
        assert self.step is not None
        problem = unit_problem(self.step.graph, size)
        return carry_out(self.step, problem, Answer.of_plan(problem, plan, method="greedy"))

    def run_by(self, planned: Planned) -> None:
        """Let calls of the kind of the trial run by a plan.

        Raises:
            CaptureError: the trial called the stage with two kinds of arguments.
        """
        made = self.carrier.backend.trained
        if len(made) != 1:
            raise CaptureError(self._twice)
        made[0].use(planned)

    @property
    def _twice(self) -> str:
        return (
            f"{self.name} runs with two kinds of arguments or in parts in one step, which the budget of a rank cannot "
            "follow yet"
        )


TRIALS = 3
"""Steps of ranks that are watched on the CPU: threads of gloo free some messages, of which the allocator tells nobody,
so that these seem to stay."""

BETWEEN = "between"
"""The label of what lies between two passes of stages; that of a pass is its kind and the number of its stage."""


class Trace:
    """The allocator's events of one step, cut where passes of stages begin and end."""

    def __init__(self, device: torch.device) -> None:
        self._watch = of(device).watch()
        self._trials = TRIALS if device.type == "cpu" and dist.is_available() and dist.is_initialized() else 1

    def least(self, run: Callable[[], object], clear: Callable[[], None]) -> list[Interval]:
        """As `watch`, but of several steps the least in each interval; `clear` is called before each."""
        seen = []
        for _ in range(self._trials):
            clear()
            gc.collect()
            seen.append(self.watch(run))
        return [min(same, key=lambda part: part.peak_bytes) for same in zip(*seen, strict=True)]

    def watch(self, run: Callable[[], object]) -> list[Interval]:
        """Run a step whose stages' plans are `marked`, and say what was seen."""
        self._watch.start()
        try:
            result = run()
        finally:
            seen = self._watch.stop(BETWEEN)
        del result
        return seen

    def marked(self, planned: Planned, stage: int) -> Planned:
        """A plan that tells when its passes begin and end."""

        def backward(function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
            self._watch.cut(BETWEEN)
            gradients = function(args)
            self._watch.cut(f"backward {stage}")
            return gradients

        def run(*given: Any) -> Any:
            self._watch.cut(BETWEEN)
            output = planned.run(*given, around=backward)
            self._watch.cut(f"forward {stage}")
            return output

        return replace(planned, run=run)

    def around_second_half(self, stage: int) -> Callable[[Callable[[], None]], None]:
        """What tells when the second halves of a stage's backward passes begin and end."""

        def around(run: Callable[[], None]) -> None:
            self._watch.cut(BETWEEN)
            run()
            self._watch.cut(f"weight {stage}")

        return around
