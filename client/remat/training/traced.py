"""Plans of the graphs that Dynamo captures of a module that trains: all that a job adds to them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from remat_ir import Plan

from .. import generators
from ..compile.plans import PlannedSizes, Run, Traced, point_of
from ..compile.shared import SharedBudget
from ..compile.sized import Backend, SizedGraph
from ..device import capturing
from ..device_flags import device_failed
from ..errors import CaptureError
from ..planning.budget import Budget, Fraction
from ..planning.options import OnFailure, SolveOptions
from ..planning.plan_file import PinnedPlanner
from ..planning.planner import CoordinatedPlanner
from ..planning.quick import Better, tell_of_better
from .backward import NotReleasable
from .job import Job
from .memory import SelfCheck, StepPeak
from .reporting import measured
from .step import Planned

log = logging.getLogger("remat")

WHOLE = Fraction(1.0)

MakePlan: TypeAlias = Callable[[nn.Module, Traced, Sequence[Planned]], Planned]
"""Plans a traced graph of a module, given the plans of the same code for other calls, the latest last."""


@dataclass(eq=False)
class Trained(PlannedSizes):
    """One graph of Dynamo's at one set of sizes, in a job that trains a module.

    Attributes:
        planned: the plan that it runs by, and what is known of it.
        check: measures the peak of its first step; None: nothing does.
        new: whether it has just been made: its first call runs by the plan that it was made with.
        catches: whether a plan that does not run in its first call is given up where nothing measures it, too.
        tried: whether a call has run by the plan, where that is caught.
    """

    planned: Planned = field(kw_only=True)
    check: SelfCheck | None = field(kw_only=True, repr=False)
    on_failure: OnFailure = field(kw_only=True, repr=False)
    new: bool = field(default=True, kw_only=True, repr=False)
    catches: bool = field(default=True, kw_only=True, repr=False)
    tried: bool = field(default=False, kw_only=True, repr=False)

    @classmethod
    def of(cls, planned: Planned, check: SelfCheck | None, on_failure: OnFailure, catches: bool = True) -> Trained:
        """What runs by a plan that has just been made."""
        made = cls(
            planned.step.graph,
            planned.answer,
            planned.run,
            None,
            priced=planned.step,
            planned=planned,
            check=check,
            on_failure=on_failure,
            catches=catches,
        )
        made.use(planned)
        return made

    def compiled(self, plan: Plan) -> Run:
        """What runs it by a plan that the verifier has passed, in a step of several calls."""
        function, tried = self.planned.step.compile(plan), False

        def run(*inputs: Any) -> Any:
            nonlocal tried
            if self.failed:
                return self._plainly(inputs)
            if tried or capturing():
                return function(inputs)
            output = self._first(partial(function, inputs), inputs)
            tried = not self.failed
            return output

        return run

    def use(self, planned: Planned) -> None:
        """Run by this plan from the next call on."""
        if self.check is not None:
            self.check.forget(self.planned)
            self.check.expect(planned)
        self.planned, self.graph, self.answer, self.run = planned, planned.step.graph, planned.answer, planned.run
        self.tried = not self.catches

    @property
    def looked_for(self) -> Better[Planned] | None:
        """The better plan that is still to come."""
        return None if self.planned.better is None or self.planned.better.over else self.planned.better

    def take_over(self) -> None:
        """Run by the better plan from now on, if it has come; a call that has begun ends by the plan it began with."""
        better, new, self.new = self.looked_for, self.new, False
        if better is None or new:
            return
        before, found = self.answer, better.take(self.outstanding.may_change())
        if found is not None:
            tell_of_better(found.answer, before)
            self.use(found)

    def known(self) -> Planned:
        """Its plan, with the better answer that has come for it: that takes over at its own next call."""
        found = None if self.looked_for is None else self.looked_for.found()
        return self.planned if found is None else replace(self.planned, answer=found)

    def __call__(self, *inputs: Any) -> Any:
        """One forward pass by the plan; as Dynamo captured it, where its first step did not run.

        Raises:
            CaptureError: it did not, and `on_failure` is "raise".
        """
        if self.failed:
            return self._plainly(inputs)
        check, planned = self.check, self.planned
        run = partial(planned.run, inputs)
        due, untimed = check is not None and planned in check.due, check is not None and planned in check.untimed
        if (self.tried and not due and not untimed) or capturing():
            output = run()
        elif check is not None and due:
            output = self._first(partial(check.watch, planned, run), inputs)
        elif check is not None and untimed:
            output = check.time(planned, run)
        else:
            output = self._first(run, inputs)
        if self.looked_for is not None and not self.failed:
            self.outstanding.note(output)
        return output

    def _first(self, run: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        """A first call by a plan; as Dynamo captured the graph, where it does not run.

        Raises:
            CaptureError: it does not, and `on_failure` is "raise".
        """
        before = generators.noted()
        try:
            output = run()
        except (RuntimeError, CaptureError) as error:
            if isinstance(error, NotReleasable) or device_failed(error):
                raise
            before.restore_torch()  # a step draws no other numbers after its inputs are read
            output = self._plainly(inputs)  # raises what the module's code raises
            self._refuse(error)
        else:
            self.tried = True
        return output

    def _plainly(self, inputs: Sequence[Any]) -> Any:
        module = self.planned.step.captured.module
        taken = len(module.graph.find_nodes(op="placeholder"))
        return module(*inputs[len(inputs) - taken :])

    def _refuse(self, error: Exception) -> None:
        """The step has no plan from now on.

        Raises:
            CaptureError: unless `on_failure` is "plain".
        """
        text = str(error).partition("\n")[0]
        if not isinstance(error, CaptureError):
            text = f"the captured step does not run, since real tensors do not lie in memory as the traced ones: {text}"
        if self.on_failure != "plain":
            raise error if isinstance(error, CaptureError) else CaptureError(text) from error
        log.warning("training runs without a plan: %s", text)
        self.failed = True
        if self.check is not None:
            self.check.forget(self.planned)


class TrainingBackend(Backend):
    """The backend of one module that trains, with all that its job has: optimizer, gradients that stay, a check.

    Args:
        job: of which `release` may outdate plans; None: nothing does.
        counts_gradients: whether plans hold for calls alone that find gradients as the call did that was planned.
        budget: of a whole step, where it has several calls; `make_plan` has its own for a step of one.
        make_least: as `make_plan` for such calls: by the plan that holds least; None: each has the whole budget.
        file: has plans of its own for such calls; no planner is asked for others then.
        shared: the budget, where it is one of several modules.
    """

    def __init__(
        self,
        model: nn.Module,
        make_plan: MakePlan,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        job: Job | None = None,
        counts_gradients: bool = False,
        budget: Budget = WHOLE,
        make_least: MakePlan | None = None,
        file: PinnedPlanner | None = None,
        shared: SharedBudget | None = None,
    ) -> None:
        super().__init__(budget, planner, asking, shared=shared, of=model)
        self._model, self._make_plan = weakref.ref(model), make_plan  # Dynamo holds the backend as long as the code
        self._make_least, self.shared.shares = make_least, make_least is not None
        self._file, self.shared.improves = file, file is None
        self._job, self._release = job, None if job is None else job.release
        self._settled = False  # whether all plans count the gradients of all parameters
        self._counts_gradients = counts_gradients and asking.accumulate == 1 and not asking.release_gradients
        self.check = SelfCheck(self._measured) if asking.self_check else None

    def _measured(self, planned: Planned, found: StepPeak) -> None:
        measured(self.given.here(), planned, found)

    @property
    def _models(self) -> nn.Module:
        """The module, or all those that share its budget."""
        found = [*self.shared.backends]
        return found[0] if len(found) == 1 else nn.ModuleList(found)

    @property
    def takes_parts(self) -> bool:
        """No: Dynamo says that a module's forward is one graph before it is planned."""
        return False

    def state(self) -> tuple[Any, ...]:
        """Gradients that are there before a step, where the budget counts them, and gradients that hooks leave."""
        outdated = "" if self._release is None else self._release.outdated
        model = self._model() if self._counts_gradients and not self._settled else None
        found = model is not None and any(p.is_leaf and p.grad is not None for p in model.parameters())
        return found, outdated

    def solve(self, graph: SizedGraph, traced: Traced) -> PlannedSizes:
        """A plan of a traced graph within the job.

        Raises:
            CaptureError, PlanningError: there is none.
        """
        model = self._models
        known = [each.known() for each in graph.of_this_frame() if isinstance(each, Trained)]
        planned = self._make_plan(model, traced, known)
        stay = 0 if self._job is None else self._job.gradients(model, True)
        self._settled = (self._settled or not self.trained) and planned.step.fixed.get("gradients", 0) >= stay
        return Trained.of(planned, self.check, self.asking.on_failure, catches=self._make_least is not None)

    def least(self, graph: SizedGraph, traced: Traced) -> PlannedSizes:
        """By the plan that holds least, in a step of several calls.

        Raises:
            CaptureError: the graph cannot be planned.
            PlanMismatch: a plan file has no plan of it, and must.
        """
        assert self._make_least is not None
        planned = self._make_least(self._models, traced, ())
        made = Trained.of(planned, None, self.asking.on_failure)
        for plan in [] if self._file is None else self._file.plans_of(made.graph):
            made.add(point_of(made.priced, plan))
        return made

    @property
    def trained(self) -> list[Trained]:
        """All that has a plan now."""
        return [each for each in self.planned if isinstance(each, Trained)]

    @property
    def peaks(self) -> Mapping[Planned, StepPeak]:
        """What the first step of each plan came to, where it has run and was watched."""
        return {} if self.check is None else self.check.found
