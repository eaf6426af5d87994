"""One module that is planned next to others inside one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from remat_ir import Answer, Plan, checkpointed

from ..compile.curve import unit_problem
from ..compile.sized import Traced
from ..errors import CaptureError
from ..planning.budget import UnitBytes
from ..planning.options import OnFailure, SolveOptions
from ..planning.phases import Phases
from ..planning.planner import CoordinatedPlanner
from ..training.enable import install, refuse_enabled
from ..training.halves import Halves
from ..training.job import Job
from ..training.optimize import carry_out, planned_step, profiled_step
from ..training.planned import Planned
from ..training.reserved import Whole
from ..training.step import TrainingStep
from ..training.traced import TrainingBackend

UNBOUNDED = 2**53


class Unit:
    """One unit: first it runs by the plan that holds least, then within what it was given.

    Args:
        halves: runs the second halves of its backward passes; None: they are whole.

    Attributes:
        size: within which calls of other sizes than the trial's are planned; None: nothing is picked yet.
        whole: the model, where its budget is one of bytes of an accelerator, which those calls are held to as well.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        halves: Halves | None = None,
        on_failure: OnFailure = "raise",
    ) -> None:
        self.name, self.module, self.halves = name, module, halves
        self.step: TrainingStep | None = None
        self.size: UnitBytes | None = None
        self.whole: Whole | None = None
        self.failed: CaptureError | None = None
        self.first: Planned
        self._planner, self._asking = planner, asking
        refuse_enabled(module)
        options = replace(asking, self_check=False, on_failure=on_failure)
        self.carrier = install(module, lambda model: TrainingBackend(model, self._make_plan, planner, options))

    def _make_plan(self, model: nn.Module, traced: Traced, known: Sequence[Planned]) -> Planned:
        with Phases(lambda _: None) as phases:
            return self._planned(model, traced, known, phases)

    def _planned(self, model: nn.Module, traced: Traced, known: Sequence[Planned], phases: Phases) -> Planned:
        if self.size is not None:
            job = Job()
            given = self._planner, self._asking, job, known, phases
            step = profiled_step(model, traced, *given, halves=self.halves)
            return planned_step(step, model, self.size, *given, whole=self.whole)
        try:
            if self.step is not None and self.carrier.backend.trained:
                raise CaptureError(
                    f"{self.name} runs twice in one step, with two kinds of arguments or in parts, which a budget for "
                    "units cannot follow yet"
                )
            self.step = profiled_step(model, traced, self._planner, self._asking, None, (), phases, halves=self.halves)
            self.first = self.carried_out(UnitBytes(UNBOUNDED // 4, UNBOUNDED // 4), checkpointed(self.step.graph))
        except CaptureError as error:
            self.failed = error
            raise
        return self.first

    def carried_out(self, size: UnitBytes, plan: Plan) -> Planned:
        """A plan of this unit within its bounds, verified; compiled in the unit's next call, under the state there."""
        assert self.step is not None
        problem = unit_problem(self.step.graph, size)
        return carry_out(self.step, problem, Answer.of_plan(problem, plan, method="greedy"))

    def run_by(self, planned: Planned) -> None:
        """Let calls of the kind of the trial run by a plan.

        Raises:
            CaptureError: the trial called the unit with two kinds of arguments.
        """
        made = self.carrier.backend.trained
        if len(made) != 1:
            raise CaptureError(
                f"{self.name} runs twice in one step, with {len(made)} kinds of arguments or in parts, which a "
                "budget for units cannot follow yet"
            )
        made[0].use(planned)
