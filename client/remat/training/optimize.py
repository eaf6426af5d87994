"""`remat.optimize`: capture, profile, ask, verify, and the module that trains by the plan."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import fx, nn

from remat_ir import Answer, Graph, InvalidData, InvalidPlan, Plan, Problem, verify

from .. import _compat
from ..capture.call import check_module, example_call
from ..capture.guards import Call
from ..capture.operations import check_functional
from ..chains.chained import ChainedModule
from ..chains.training import ChainAsked, plan_chain, stages_budget
from ..errors import CaptureError
from ..planning.budget import Budget, Fraction, bounded, budget_bytes, read_budget, readable, share_for
from ..planning.checkpoints import by_regions
from ..planning.headline import headline
from ..planning.options import SolveOptions, TrainingFields, solve_options
from ..planning.phases import Phases
from ..planning.plan_file import PinnedPlanner, PlanFile
from ..planning.planner import CoordinatedPlanner, Planner, check_method, page_of, plan_or_raise, planner_for
from ..planning.quick import Better, improved, quick_answer
from ..planning.sources import OnProgress
from ..profiling.fixed import existing_gradients
from ..profiling.optimizers import check_optimizer
from .halves import Halves
from .job import Job, warn_of_update
from .module import MakePlan, Rematerialized, refuse_enabled
from .names import name_of, with_name
from .planned import Planned
from .reserved import StepRoom, Whole, linked
from .step import BUSY, TrainingStep, running_peak, training_step

log = logging.getLogger("remat")


def optimize(
    model: nn.Module,
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    plan: str | os.PathLike[str] | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    on_progress: OnProgress | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[TrainingFields],
) -> Rematerialized:
    """Make a module that trains inside a memory budget, with the gradients of stock `aot_eager`, bit for bit.

    Eager PyTorch may differ from both by rounding: see `docs/exactness.md`.

    The training step is captured for the example inputs without running it, its kernels are profiled one by one, and
    the plan is asked for now. The module that is made has the `state_dict`, parameters and buffers of `model`.

    Args:
        example_args, example_kwargs: one call of the model. The first is a tuple or list of positional arguments, one
            tensor, or a dict of keyword arguments, such as a tokenizer's batch.
        budget: bytes of the device ("12GiB", 12 * 2**30), a share of what plain training needs beyond its fixed bytes
            ("50%", `remat.Fraction(0.5)`), or `remat.ActivationBytes("2GiB")`; with `plan` None is the file's.
        plan: a file that `remat.save_plans` or the command `remat plan` wrote. Its plan is verified on the step that is
            captured here and priced by the kernels here, and nobody is asked; the first step must be one of the file's.
        planner: None (the service of REMAT_BASE_URL, else the local solver, else the client's own greedy plan), a URL,
            "local", "greedy", or any object with the method `plan`.
        optimizer: counted with the state that its first step will make, and with what that takes while it runs: see
            `Planned.update_peak_bytes`.
        ema: copies of the parameters that are held as well, as a module or as tensors.
        on_progress: called with a `remat_ir.Progress` at each improvement, such as `print`; without it a terminal shows
            what is done and for how long.
        options, fields: a `remat.SolveOptions`, its fields as keywords, or both; a keyword counts.

    A call of another size gets a plan of its own. It starts on the plan of a size that is known, verified on the new
    one, or else on a quick plan, and the planner's takes over as with `wait=False`. Kernels of a size between two known
    ones, or little below, are not timed: their times follow from those two.

    Raises:
        CaptureError: the training step cannot be captured; the message says why.
        BudgetTooSmall, NothingFound: there is no plan; the message says what is enough.
        PlanMismatch: the plan file is for another step, and which op differs; or its plan does not fit the budget.
        InvalidData: not a budget, not a planner, not an optimizer, or not an option; before anything is captured.
        RuntimeError: remat is enabled on the module.
    """
    check_module(model)
    refuse_enabled(model)
    asking = solve_options(optimize, TrainingFields, options, fields)
    args, kwargs = example_call(example_args, example_kwargs)
    make_plan = planning(
        budget, asking, plan=plan, planner=planner, optimizer=optimizer, ema=ema, on_progress=on_progress
    )
    made = Rematerialized(model, make_plan, asking.on_failure, asking.self_check, asking.most_plans)
    made.plan_for(args, kwargs)
    return made


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
    found = planner_for(planner)
    check_method(found.asked, options.method)
    return found


def planning(
    budget: Budget | None,
    options: SolveOptions,
    *,
    plan: str | os.PathLike[str] | None = None,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    on_progress: OnProgress | None = None,
) -> MakePlan:
    """How each kind of call is planned when it is first seen; the arguments are those of `optimize`."""
    job = Job(optimizer, ema, options.accumulate, options.clip_grad_norm, options.release_gradients)
    release = job.release  # refuses an optimizer that cannot step for one parameter by itself
    if release is not None and not release.together and options.mode == "chain":
        raise InvalidData("release_gradients=True needs a captured step, which mode='chain' has not")
    if options.link is not None and options.mode == "chain":
        raise InvalidData("link= is for a captured step: stages with a link are remat.optimize_chain(offload=True)")
    file = None if plan is None else PlanFile(plan)
    if budget is None and file is None:
        raise InvalidData("a budget is needed: budget='12GiB', budget='50%', or plan= with a plan file")
    bytes_there: Budget | PlanFile = file if budget is None else read_budget(budget)  # type: ignore[assignment]
    given = check_training("0B" if budget is None else budget, options, planner, optimizer)
    if file is not None:
        if options.mode == "chain":
            raise InvalidData("a plan file has plans of captured steps: plan= does not go with mode='chain'")
        options = replace(options, mode="graph")
    pinned = None if file is None else PinnedPlanner(file, None if budget is None else given.asked)

    def graph(call: Call, known: Sequence[Planned | ChainedModule]) -> Planned:
        asked = given.here()
        if pinned is not None:
            asked = copy.copy(asked)
            asked.asked = pinned
        began = time.monotonic()
        asking = with_name(options, name_of(call.module, call.args, call.kwargs))
        with Phases(on_progress) as phases:
            steps = [made for made in known if isinstance(made, Planned)]
            made = plan_step(call, bytes_there, asked, asking, job=job, known=steps, phases=phases)
            took, answer = time.monotonic() - began, made.answer
            url = page_of(asked.asked, answer)
            phases.end(headline(made.step.graph, answer, peak_bytes=made.predicted_bytes, seconds=took, url=url))
        return made

    def chain(call: Call, known: Sequence[Planned | ChainedModule]) -> ChainedModule:
        asking = with_name(options, name_of(call.module, call.args, call.kwargs))
        asked = ChainAsked(stages_budget(budget, asking.slack), given.here(), asking, job.optimizer, job.ema)  # type: ignore[arg-type]
        return _plan_stages(call, asked, known, on_progress)

    def make_plan(call: Call, known: Sequence[Planned | ChainedModule]) -> Planned | ChainedModule:
        if options.mode == "chain":
            return chain(call, known)
        try:
            return graph(call, known)
        except CaptureError as error:
            if options.mode == "graph" or options.link is not None or not _is_chain(call) or not error.stages_may_do:
                raise
            log.info("the stages run as a chain: %s", error)
            return chain(call, known)

    return make_plan


def _plan_stages(
    call: Call, asked: ChainAsked, known: Sequence[Planned | ChainedModule], on_progress: OnProgress | None
) -> ChainedModule:
    if not _is_chain(call):
        raise CaptureError(f"chain mode takes an nn.Sequential and one tensor, not {type(call.module).__name__}")
    chains = [made for made in known if isinstance(made, ChainedModule)]
    stages = list(call.module)  # type: ignore[call-overload]
    return plan_chain(stages, call.args[0], asked, known=chains, on_progress=on_progress)


def _is_chain(call: Call) -> bool:
    """Whether a call runs stages one after the other, the first on the only argument."""
    one = len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], torch.Tensor)
    model = call.module
    return one and isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def plan_step(
    call: Call,
    budget: Budget | PlanFile,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    *,
    job: Job | None = None,
    known: Sequence[Planned] = (),
    phases: Phases | None = None,
    halves: Halves | None = None,
    whole: Whole | None = None,
) -> Planned:
    """Capture, profile and plan one kind of call; the plan is verified here, whoever made it.

    On an accelerator a budget in bytes holds for what the driver has to give: segments of the allocator, replayed by
    its model, and what lies outside. Where a plan's segments come to more, it is planned for again with less.

    Args:
        job: what else is there, and steps the parameters.
        known: plans of other kinds of calls, the latest last. With any, nothing is waited for: one that fits, or else
            a quick plan, is used until the planner's is there.
        halves: as for `training_step`.
        whole: what the step is a part of, where that has a budget of its own in bytes of an accelerator.
    """
    phases, job = phases or Phases(), job or Job()
    step = _captured(call, planner, options, job, known, phases, halves)
    settled = step.fixed["gradients"] >= job.gradients(call.module, True)
    gradients = None if settled or not isinstance(budget, int) else call.finds_gradients()
    problem = _problem(step.graph, budget, options, known)
    _tell_of_checkpoints(step, budget, problem)
    if whole is None:
        absent = step.fixed["gradients"] - existing_gradients(call.module)
        room = StepRoom(step, budget, options.slack, job, absent, planner.coordinator)
        problem = room.planned(problem)
    else:
        room = StepRoom(step, whole.budget_bytes, 1.0, whole.job, whole.absent(step), planner.coordinator)
    asked = _Asked(step, planner, options, known, phases, budget)

    def over(_: Problem, answer: Answer) -> int:
        return 0 if asked.pinned else room.over(lambda: room.reserved(answer.plan))

    phases.begin("planning")
    problem, answer = room.settled(problem, asked.answer, over)

    def carried(answer: Answer) -> Planned:
        return replace(carry_out(step, problem, answer, room, now=True), job=job, gradients=gradients)

    def better(answer: Answer) -> Planned | None:
        """Made and compiled at the next call of this kind, under the state that its guards have seen."""
        if not isinstance(answer.plan, Plan) or room.over_here(lambda: room.reserved(answer.plan)):
            return None
        return carried(answer)

    phases.begin("compiling")
    made = carried(answer)
    warn_of_update(job, made.update_peak_bytes, answer.budget_bytes)
    return replace(made, better=asked.better(problem, answer, better))


def _captured(
    call: Call,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    job: Job,
    known: Sequence[Planned],
    phases: Phases,
    halves: Halves | None,
) -> TrainingStep:
    """The step of a call, with the link that options mean."""
    with BUSY:
        step = training_step(
            call.module,
            call.args,
            call.kwargs,
            table=planner.profiles,
            extra=job.fixed(call.module),
            like=known[-1].step if known else None,
            sizes=[planned.step.profiled for planned in known],
            one_plan=planner.coordinator.in_step,
            run=call.run,
            release=job.release,
            halves=halves,
            functional=options.functional_ops,
            collectives_again=options.recompute_collectives,
            phase=phases.begin,
        )
    return linked(step, options, planner.coordinator)


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
        if not self.at_once or (answer.gap or 0) <= self.options.max_gap:
            return None
        log.info("training starts on %s", "the plan of another size" if answer.cache == "near" else "a quick plan")
        return improved(problem, self.planner, self.options, answer, make, self.phases.on_progress)


def _problem(graph: Graph, budget: Budget | PlanFile, options: SolveOptions, known: Sequence[Planned]) -> Problem:
    """What is asked about a step."""
    if isinstance(budget, PlanFile):
        return Problem(graph, budget.budget_bytes(graph))
    return Problem(bounded(graph, budget), max(budget_bytes(budget, graph, options.slack), _room(budget, graph, known)))


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


def _room(budget: Budget, graph: Graph, known: Sequence[Planned]) -> int:
    """What a share of an earlier, larger call came to: the last, smaller batch of an epoch may use as many bytes."""
    if not isinstance(budget, Fraction):
        return 0
    rooms = (planned.answer.budget_bytes - planned.step.graph.fixed_bytes for planned in known)
    return graph.fixed_bytes + max(rooms, default=0)


def carry_out(
    step: Any, problem: Problem, answer: Answer, room: StepRoom | None = None, *, now: bool = False
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
