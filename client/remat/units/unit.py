"""One module that is planned next to others inside one budget."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from remat_ir import Answer, Plan, checkpointed

from ..capture.guards import Call
from ..chains.chained import ChainedModule
from ..errors import CaptureError
from ..planning.budget import UnitBytes
from ..planning.options import OnFailure, SolveOptions
from ..planning.planner import CoordinatedPlanner
from ..training.enable import install
from ..training.halves import Halves
from ..training.module import refuse_enabled
from ..training.optimize import carry_out, plan_step
from ..training.planned import Planned
from ..training.reserved import Whole, linked
from ..training.step import BUSY, TrainingStep, training_step
from .curve import unit_problem

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
        self.planned = install(module, self._make_plan, self_check=False, on_failure=on_failure)

    def _make_plan(self, call: Call, known: Sequence[Planned | ChainedModule]) -> Planned:
        if self.size is not None:
            steps = [made for made in known if isinstance(made, Planned)]
            given = self.size, self._planner, self._asking
            return plan_step(call, *given, known=steps, halves=self.halves, whole=self.whole)
        try:
            self.first = self._captured(call)
        except CaptureError as error:
            self.failed = error
            raise
        return self.first

    def _captured(self, call: Call) -> Planned:
        with BUSY:
            self.step = training_step(
                call.module,
                call.args,
                call.kwargs,
                table=self._planner.profiles,
                one_plan=self._planner.coordinator.in_step,
                run=call.run,
                functional=self._asking.functional_ops,
                collectives_again=self._asking.recompute_collectives,
                halves=self.halves,
            )
        self.step = linked(self.step, self._asking, self._planner.coordinator)
        return self.carried_out(UnitBytes(UNBOUNDED // 4, UNBOUNDED // 4), checkpointed(self.step.graph))

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
        if len(self.planned.plans) != 1:
            raise CaptureError(
                f"{self.name} runs twice in one step, with {len(self.planned.plans)} kinds of arguments, which a "
                "budget for units cannot follow yet"
            )
        self.planned.put(next(iter(self.planned.plans)), planned)
