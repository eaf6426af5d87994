"""How a module's calls are planned: profile what was traced, ask, verify, lower."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from remat_ir import Answer, Graph, InvalidData, InvalidPlan, Plan, Problem, checkpointed, readable, verify

from .. import _compat
from ..capture.dataflow import device_of
from ..capture.operations import check_functional
from ..chains.modules import ChainedModule
from ..chains.training import StagesAsked, plan_chain, stages_budget
from ..compile.plans import Traced
from ..compile.shared import SharedBudget
from ..distributed import planner_of
from ..lowering.link import link_for
from ..planning.budget import Budget, Fraction, bounded, budget_bytes, read_budget, share_for, share_sentence
from ..planning.checkpoints import by_regions
from ..planning.options import SolveOptions, with_name
from ..planning.phases import Phases
from ..planning.plan_file import PinnedPlanner, PlanFile
from ..planning.planner import CoordinatedPlanner, Planner, check_method, page_of, plan_or_raise
from ..planning.quick import Better, improved, quick_answer, stands_in
from ..planning.sources import OnProgress
from ..planning.summary import headline
from ..profiling.fixed import existing_gradients
from ..profiling.optimizers import check_optimizer
from .backward import Halves
from .job import Job, warn_of_update
from .memory import StepRoom
from .reporting import send_names
from .step import BUSY, Planned, TrainingStep, name_of, running_peak, traced_step
from .traced import TrainingBackend

log = logging.getLogger("remat")


def check_training(
    budget: Budget, options: SolveOptions, planner: Planner | str | None, optimizer: Any
) -> CoordinatedPlanner:
    """The planner that is asked, once everything is known to be what training takes.

    Raises:
        InvalidData: something is not; the message says what, and what it must be.
    """
    read_budget(budget)
    check_optimizer(optimizer)
    check_functional(options.functional_ops)
    if options.mode == "chain":
        stages_budget(budget, options.slack)
    found = planner_of(planner, options)
    check_method(found.asked, options.method)
    return found


@dataclass(frozen=True, eq=False)
class Planning:
    """How a module's calls are planned when they are first seen.

    Attributes:
        budget: or the plan file that says it.
        file: answers for the steps that are in it.
    """

    budget: Budget | PlanFile
    options: SolveOptions
    planner: CoordinatedPlanner
    job: Job
    file: PinnedPlanner | None = None
    on_progress: OnProgress | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Planning:
        """Itself: a copy of a module is planned as the module is, by the same planner and within the same job."""
        return self

    @property
    def _divided(self) -> tuple[Budget, SolveOptions]:
        """What the calls of a step share, and the options that go with it."""
        if isinstance(self.budget, PlanFile):  # which has counted the slack
            return self.budget.shared_bytes, replace(self.options, slack=1.0)
        return self.budget, self.options

    def shared(self) -> SharedBudget:
        """A budget for several modules, which their calls share from the first step on."""
        budget, options = self._divided
        shared = SharedBudget(budget, self.planner, options)
        shared.share()
        return shared

    def backend(self, model: nn.Module, refuses: bool = False, shared: SharedBudget | None = None) -> TrainingBackend:
        """The backend of a module, without plans.

        Args:
            refuses: whether it raises where a graph cannot be planned, whatever the options say.
            shared: the budget, where it is one of several modules.
        """
        budget, options = self._divided
        options = replace(options, on_failure="raise") if refuses else options
        given = self.planner, options, self.job, isinstance(self.budget, int), budget
        return TrainingBackend(model, self.step, *given, self.least, self.file, shared)

    def step(self, model: nn.Module, traced: Traced, known: Sequence[Planned]) -> Planned:
        """A plan of a traced graph.

        Raises:
            CaptureError, PlanningError: there is none.
        """
        asked = self.planner.here()
        if self.file is not None:
            asked = copy.copy(asked)
            asked.asked = self.file
        began = time.monotonic()
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        asking = with_name(self.options, name_of(model, [t for t in traced.inputs if id(t) not in own], {}))
        with Phases(self.on_progress) as phases:
            step = profiled_step(model, traced, asked, asking, self.job, known, phases)
            made = planned_step(step, model, self.budget, asked, asking, self.job, known, phases)
            took, answer = time.monotonic() - began, made.answer
            url = page_of(asked.asked, answer)
            if isinstance(self.budget, Fraction) and not known:
                log.info("%s", share_sentence(step.graph, answer.budget_bytes))
            phases.end(headline(made.step.graph, answer, peak_bytes=made.predicted_bytes, seconds=took, url=url))
        send_names(asked, made)
        return made

    def least(self, model: nn.Module, traced: Traced, known: Sequence[Planned]) -> Planned:
        """The plan of a traced graph that holds least, for a step of several calls; no planner is asked.

        Raises:
            CaptureError: it cannot be planned.
        """
        with Phases(self.on_progress) as phases:
            step = profiled_step(model, traced, self.planner.here(), self.options, self.job, known, phases)
        problem = Problem(step.graph, 2**53)
        answer = Answer.of_plan(problem, checkpointed(step.graph), method="greedy")
        return replace(carry_out(step, problem, answer, now=True), job=self.job)

    def chain(self, model: nn.Module, x: torch.Tensor, known: Sequence[ChainedModule]) -> ChainedModule:
        """Stages by a chain plan, for a call with this tensor.

        Raises:
            CaptureError, PlanningError: there is none.
        """
        asking = with_name(self.options, name_of(model, (x,), {}))
        assert not isinstance(self.budget, PlanFile)
        assert isinstance(model, nn.Sequential)
        budget = stages_budget(self.budget, asking.slack)
        asked = StagesAsked(budget, self.planner.here(), asking, self.job.optimizer, self.job.ema)
        return plan_chain(list(model), x, asked, known=known, on_progress=self.on_progress)


def planning(
    budget: Budget | None,
    options: SolveOptions,
    *,
    plan: str | os.PathLike[str] | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    on_progress: OnProgress | None = None,
) -> Planning:
    """How calls are planned; the arguments are those of `optimize`.

    Raises:
        InvalidData: they are not; the message says what must be.
    """
    job = Job(optimizer, ema, options.accumulate, options.clip_grad_norm, options.release_gradients)
    release = job.release  # refuses an optimizer that cannot step for one parameter by itself
    if release is not None and not release.together and options.mode == "chain":
        raise InvalidData("release_gradients=True needs a captured step, which mode='chain' has not")
    if options.link is not None and options.mode == "chain":
        raise InvalidData("link= is for a captured step: stages with a link are remat.optimize_chain(offload=True)")
    file = None if plan is None else PlanFile(plan)
    bytes_there: Budget | PlanFile | None = file if budget is None else read_budget(budget)
    if bytes_there is None:
        raise InvalidData("a budget is needed: budget='12GiB', budget='50%', or plan= with a plan file")
    given = check_training("0B" if budget is None else budget, options, planner, optimizer)
    if file is not None:
        if options.mode == "chain":
            raise InvalidData("a plan file has plans of captured steps: plan= does not go with mode='chain'")
        options = replace(options, mode="graph")
    pinned = None if file is None else PinnedPlanner(file, None if budget is None else given.asked)
    return Planning(bytes_there, options, given, job, pinned, on_progress)


def planned_step(
    step: TrainingStep,
    module: nn.Module,
    budget: Budget | PlanFile,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    job: Job,
    known: Sequence[Planned],
    phases: Phases,
) -> Planned:
    """A plan of a step that has been priced; it is verified here, whoever made it.

    On an accelerator a budget in bytes holds for what the driver has to give: segments of the allocator, replayed by
    its model, and what lies outside. Where a plan's segments come to more, it is planned for again with less.

    Args:
        job: what else is there, and steps the parameters.
        known: plans of other calls, the latest last. With any, nothing is waited for: one that fits, or else a quick
            plan, is used until the planner's is there.

    Raises:
        PlanningError: there is none.
    """
    problem = _problem(step.graph, budget, options, known)
    _tell_of_checkpoints(step, budget, problem)
    absent = step.fixed["gradients"] - existing_gradients(module)
    room = StepRoom(step, budget, options.slack, job, absent, planner.coordinator)
    problem = room.planned(problem)
    asked = _Asked(step, planner, options, known, phases, budget)

    def over(_: Problem, answer: Answer) -> int:
        return 0 if asked.pinned else room.over(lambda: room.reserved(answer.plan))

    phases.begin("planning")
    problem, answer = room.settled(problem, asked.answer, over)

    def carried(answer: Answer) -> Planned:
        return replace(carry_out(step, problem, answer, room, now=True), job=job)

    def better(answer: Answer) -> Planned | None:
        """Made and compiled at the next call of this kind, under the state that its guards have seen."""
        if not isinstance(answer.plan, Plan) or room.over_here(lambda: room.reserved(answer.plan)):
            return None
        return carried(answer)

    phases.begin("compiling")
    made = carried(answer)
    warn_of_update(job, made.update_peak_bytes, answer.budget_bytes)
    return replace(made, better=asked.better(problem, answer, better))


def profiled_step(
    model: nn.Module,
    traced: Traced,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    job: Job | None,
    known: Sequence[Planned],
    phases: Phases,
    halves: Halves | None = None,
) -> TrainingStep:
    """The step of a traced graph, with the link that options mean.

    Args:
        job: what else is there; None: nothing, and gradients are returned at the end.
        halves: keeps the second half of each backward pass.
    """
    with BUSY:
        step = traced_step(
            traced,
            model,
            table=planner.profiles,
            extra={} if job is None else job.fixed(model),
            like=known[-1].step if known else None,
            sizes=[planned.step.profiled for planned in known],
            one_plan=planner.coordinator.in_step,
            release=None if job is None else job.release,
            halves=halves,
            functional=options.functional_ops,
            collectives_again=options.recompute_collectives,
            phase=phases.begin,
        )
    link = link_for(options, device_of(step.operations.flow), planner.coordinator)
    return step if link is None else replace(step, graph=replace(step.graph, link=link))


@dataclass(frozen=True, eq=False)
class _Asked:
    """Who is asked for plans of a step, and how."""

    step: TrainingStep
    planner: CoordinatedPlanner
    options: SolveOptions
    known: Sequence[Planned]
    phases: Phases
    budget: Budget | PlanFile

    @cached_property
    def source(self) -> Planner:
        """Who makes them: what a plan file says, or the planner."""
        asked = self.planner.asked
        return asked.planner_of(self.step.graph) if isinstance(asked, PinnedPlanner) else asked

    @property
    def pinned(self) -> bool:
        """Whether there is but one plan to take."""
        return isinstance(self.source, PinnedPlanner)

    @property
    def at_once(self) -> bool:
        """Whether training begins on a quick plan, where that is not known to be good enough."""
        return not self.pinned and (bool(self.known) or not self.options.wait)

    def answer(self, problem: Problem) -> Answer:
        """One with a plan, the same on all ranks."""

        def ask() -> Answer:
            if self.at_once:
                known = [(planned.step.graph, planned.answer) for planned in self.known]
                return quick_answer(problem, self.source, self.options, known)
            return self.source.plan(problem, self.options, on_progress=self.phases.on_progress)

        share = self.budget if isinstance(self.budget, Fraction) else None
        return plan_or_raise(self.planner.coordinator.answer(problem, ask), self.step.graph, share)

    def better(
        self, problem: Problem, answer: Answer, make: Callable[[Answer], Planned | None]
    ) -> Better[Planned] | None:
        """The plan that is looked for while training goes on by a quick one; None: there is no need."""
        if self.pinned:
            return None
        if not self.at_once:
            stood = int(stands_in(self.source, answer, self.options))
            if self.planner.coordinator.most([stood]) == [0]:
                return None
            log.warning("the planner that failed is asked again while training goes on")
        if (answer.gap or 0) <= self.options.max_gap:
            return None
        log.info("training starts on %s", "the plan of another size" if answer.cache == "near" else "a quick plan")
        return improved(problem, self.planner, self.options, answer, make, self.phases.on_progress)


def _problem(graph: Graph, budget: Budget | PlanFile, options: SolveOptions, known: Sequence[Planned]) -> Problem:
    """What is asked about a step.

    The last, smaller batch of an epoch may use as many bytes as a share of an earlier, larger call came to.
    """
    if isinstance(budget, PlanFile):
        return Problem(graph, budget.budget_bytes(graph))
    size = budget_bytes(budget, graph, options.slack)
    if isinstance(budget, Fraction):
        rooms = (planned.answer.budget_bytes - planned.step.graph.fixed_bytes for planned in known)
        size = max(size, graph.fixed_bytes + max(rooms, default=0))
    return Problem(bounded(graph, budget), size)


def _tell_of_checkpoints(step: TrainingStep, budget: Budget | PlanFile, problem: Problem) -> None:
    """Warn that a module has checkpoints of its own, and that a share is of its step without them."""
    graph, ops = step.graph, step.operations.ops
    found = _compat.own_checkpoints(step.operations.flow.joint.graph)
    if not found or not isinstance(budget, Fraction):
        return
    regions = [_region(op.nodes) for op in ops]
    plan = by_regions(graph, regions)
    peak = min(verify(Problem(graph, 2**53), plan).peak_bytes, running_peak(step, plan))
    log.warning(
        "the module has %d checkpoints of its own, which a plan takes out: a share is of the step without them. As it "
        "is, it needs about %s above the fixed bytes, a share of %s; %.4g%% come to %s",
        found,
        readable(peak - graph.fixed_bytes),
        share_for(graph, peak),
        100 * float(budget.fraction),
        readable(problem.budget_bytes - graph.fixed_bytes),
    )


def _region(nodes: Sequence[fx.Node]) -> int | None:
    """The checkpointed region in which an op runs again: that of its first node in one."""
    return next((found for node in nodes if (found := _compat.own_checkpoint(node)) is not None), None)


def carry_out(
    step: TrainingStep, problem: Problem, answer: Answer, room: StepRoom | None = None, *, now: bool = False
) -> Planned:
    """A step with an answer's plan, verified.

    Args:
        room: tells what it comes to on an accelerator.
        now: as for `TrainingStep.compile`.

    Raises:
        InvalidPlan: the plan is not one of this problem, or not what the answer claims.
    """
    if not isinstance(answer.plan, Plan):
        raise InvalidPlan(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
    verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    predicted = min(verdict.peak_bytes, running_peak(step, answer.plan))
    memory = None if room is None else room.peaks(answer.plan)
    return Planned(step, answer, step.compile(answer.plan, now), predicted, memory)
