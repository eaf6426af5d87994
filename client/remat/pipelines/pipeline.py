"""`remat.optimize_pipeline`: the stages of a pipeline, planned together for the schedule that runs them.

A step of the schedule by the plans that hold the least is watched by the allocator's own events, cut where the passes
of the rank's stages begin and end: what is left when the plans' own bytes are taken off is the rest of the rank's, such
as buffers, messages under way, gradients and the loss. Nobody plans while the schedule runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat_ir import Answer, InvalidData, Status, checkpointed, plain_plan, readable

from .. import _compat
from ..capture.call import example_call
from ..capture.dataflow import tensors
from ..capture.operations import check_functional
from ..capture.refused import fsdp_module
from ..compile.plans import Point, curve, point_of, solved
from ..compile.shared import allowed_bytes
from ..device import storage_bytes
from ..device_flags import out_of_memory
from ..distributed import RankPlanner, Ranks, planner_of
from ..errors import BudgetTooSmall, CaptureError, NothingFound
from ..planning.budget import Budget, UnitBytes, read_budget
from ..planning.coordinator import Coordinator
from ..planning.division import Option
from ..planning.options import SolveOptions, StepFields, solve_options
from ..planning.planner import CoordinatedPlanner, Planner
from ..profiling.fixed import all_gradients, resident
from ..profiling.room import ATTEMPTS, STEPS, Room, rehearsed
from ..training.backward import Halves
from ..training.compared import undisturbed
from ..training.enable import disable
from ..training.job import Job, warn_of_update
from ..training.step import Planned, TrainingStep
from .choice import Choice, Combination, Place, choose, combinations, least_budget, peak_of, places_of, room, times_of
from .schedule import Actions, Times, residency
from .stage import BETWEEN, Stage, Trace

log = logging.getLogger("remat")

EACH = SolveOptions(time_limit_s=20.0, max_gap=0.01)
"""The defaults here: several graphs are solved, and one plan of each is picked."""


def _bytes(found: Iterable[object], seen: Iterable[torch.Tensor] = ()) -> int:
    """Of the storages of tensors, but for those that were seen."""
    sizes = {_compat.storage_key(t): storage_bytes(t) for t in found if isinstance(t, torch.Tensor)}
    return sum(sizes[key] for key in set(sizes) - {_compat.storage_key(t) for t in seen})


@dataclass(frozen=True)
class PipelinePlans:
    """What the stages of a pipeline got; bytes are this rank's, times are predicted and those of all ranks.

    Attributes:
        stages: by number, this rank's alone.
        budget_bytes, predicted_bytes, measured_bytes: of a step of the schedule, fixed bytes included.
        reserved_bytes: the most that torch's allocator reserves for training by the plans, as some steps did, where the
            budget was one of a device's bytes; else None.
        fixed_bytes: parameters, buffers, inputs, the pipeline's own buffers, optimizer state, EMA copies.
        update_peak_bytes: predicted while the optimizer steps: fixed bytes, gradients, outputs, the step's temporaries.
        makespan_ns, plain_makespan_ns: of a step by these plans, and by plain ones if these fitted.
        bound_ns: no choice among the plans at hand has a shorter makespan.
    """

    stages: Mapping[int, UnitBytes]
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    fixed_bytes: int
    update_peak_bytes: int
    makespan_ns: int
    plain_makespan_ns: int
    bound_ns: int
    reserved_bytes: int | None = None

    @property
    def overhead(self) -> float:
        """Of the makespan over the plain one."""
        return self.makespan_ns / max(1, self.plain_makespan_ns) - 1

    def __str__(self) -> str:
        reserved = "" if self.reserved_bytes is None else f", {readable(self.reserved_bytes)} reserved"
        return (
            f"stages {', '.join(map(str, self.stages))} within {readable(self.budget_bytes)}: peak "
            f"{readable(self.predicted_bytes)} predicted, {readable(self.measured_bytes)} measured{reserved}; the "
            f"pipeline's makespan is {100 * self.overhead:.1f} % over plain"
        )


class Search:
    """The stages of one rank, and what the ranks agree on.

    Attributes:
        fixed_bytes, left_bytes: those that are there throughout, and what a step of the schedule leaves besides.
    """

    fixed_bytes: int
    left_bytes: int
    room: Room

    def __init__(
        self,
        stages: Sequence[Any],
        schedule: Any,
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        job: Job,
        ranks: Ranks,
    ) -> None:
        self.stages = sorted(stages, key=lambda stage: stage.stage_index)
        self.planner, self.asking, self.job, self.ranks = planner, asking, job, ranks
        self.actions = Actions(schedule)
        own = self.actions.runs[self.stages[0].group_rank]
        mine = [stage.stage_index for stage in self.stages]
        if mine != self.actions.numbers[self.stages[0].group_rank]:
            raise InvalidData(f"this rank runs the stages {sorted({r.stage for r in own})} of the schedule, not {mine}")
        self.halved = self.actions.halved & set(mine)
        self.runs = [run for run in own if run.kind != "weight" or run.stage in self.halved]
        self.moments = residency(self.runs, mine)
        self.units: list[Stage] = []
        try:
            for stage in self.stages:
                self.units.append(self._unit(stage))
        except BaseException:
            self.undo()
            raise
        self.model = nn.ModuleList([unit.module for unit in self.units])
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _unit(self, stage: Any) -> Stage:
        module, name = stage.submod, f"stage {stage.stage_index}"
        if isinstance(module, (DistributedDataParallel, *fsdp_module())):
            raise InvalidData(
                f"{name} is inside {type(module).__name__}: optimize_pipeline takes stages that are trained by one rank"
            )
        halves = Halves() if stage.stage_index in self.halved else None
        if halves is not None and stage.dw_builder is not None:
            raise InvalidData(
                f"{name} has a dw_builder of its own, by which its schedule runs the second halves of backward passes: "
                "leave it out"
            )
        unit = Stage(name, module, self.planner, self.asking, halves)
        if halves is not None:
            stage.dw_builder = halves.builder
        return unit

    def run(self, step: Callable[[], object], budget: Budget, given: object) -> PipelinePlans:
        """Trial, curves, choice and check; see `optimize_pipeline`."""
        step()  # captures each stage in its call, and makes what first steps make
        self.ranks.gather(self._captured)
        for stage, unit in zip(self.stages, self.units, strict=True):
            if unit.step is not None and not stage.is_last:
                unit.step = _tangents_apart(unit.step)
        least = [point_of(u.step, checkpointed(u.step.graph)) for u in self.units if u.step]
        plain = [point_of(u.step, plain_plan(u.step.graph)) for u in self.units if u.step]
        _, places = self._watched(step, [unit.first for unit in self.units], least)
        self._note_standing(given)
        allowed = self._allowed(budget, peak_of(places, [p.option for p in plain]))
        self.plain_ns = self.actions.makespan_ns(self.ranks.gather(lambda: [times_of(p.option) for p in plain]))
        self.points = [
            curve(u.step, ends) for u, ends in zip(self.units, zip(least, plain, strict=True), strict=True) if u.step
        ]
        return self._settled(step, places, allowed)

    def _note_standing(self, given: object) -> None:
        """See what is there after a step of the schedule; `given` is the batch, positional arguments and others."""
        left = tensors([stage.output_chunks for stage in self.stages])
        self.left_bytes = _bytes(left) + all_gradients(self.model)
        parts = {**resident(self.model, given, {}), **self.job.fixed(self.model)}
        infos = [one for s in self.stages for one in (*s.args_recv_info.values(), *s.grad_recv_info.values())]
        buffers = [getattr(info, "buffer", None) for one in infos for info in one]  # they stay from step to step
        received = _bytes(buffers, tensors(given))
        self.fixed_bytes = sum(size for name, size in parts.items() if name != "gradients") + received

    def _allowed(self, budget: Budget, plain: int) -> int:
        """The bytes above the fixed ones that a budget leaves; on an accelerator, what others take is not there."""
        self._clear()  # what is there now is then what is there throughout
        self.room = Room(self.device, budget, self.asking.slack, Coordinator())
        fixed, absent = self.fixed_bytes, sum(self.job.blocks().state)
        allowed = allowed_bytes(budget, self.asking.slack, fixed, plain)
        return self.room.left(fixed + allowed, fixed - absent) - fixed

    def _settled(self, step: Callable[[], object], places: Sequence[Place], allowed: int) -> PipelinePlans:
        """Picks that hold in real steps: what is over in one counts for the next ones."""
        rehearses = self.ranks.most([int(self.room.budget is not None)]) == [1]
        here = self.fixed_bytes
        for attempt in range(ATTEMPTS):
            points, choice = self._picked(places, allowed)
            planned = [unit.carried_out(p.size, p.plan) for unit, p in zip(self.units, points, strict=True)]
            predicted = peak_of(places, [p.option for p in points])
            measured, seen = self._watched(step, planned, points)
            log.info("pipeline: peak %s predicted, %s measured", readable(here + predicted), readable(here + measured))
            for unit, made in zip(self.units, planned, strict=True):
                unit.run_by(made)
            holds = self.ranks.all_equal(measured <= allowed)
            over = self._over(step) if holds and rehearses else 0
            (worst,) = self.ranks.most([over])
            if holds and not worst:
                for unit, point in zip(self.units, points, strict=True):
                    unit.size = point.size
                return PipelinePlans(
                    stages={stage.stage_index: p.size for stage, p in zip(self.stages, points, strict=True)},
                    budget_bytes=here + allowed,
                    predicted_bytes=here + predicted,
                    measured_bytes=here + measured,
                    fixed_bytes=here,
                    update_peak_bytes=here + self.left_bytes + self.job.update().temporaries_bytes,
                    makespan_ns=choice.makespan_ns,
                    plain_makespan_ns=self.plain_ns,
                    bound_ns=choice.bound_ns,
                    reserved_bytes=self.room.seen,
                )
            places = _more(places, seen)
            least = least_budget(places, self._options())
            if self.ranks.most([int(over > 0 and allowed <= least)]) == [1]:
                break
            if over:  # as `lowered` does it, but for no less than some choice fits
                allowed = max(least, min(allowed, predicted) - (over << attempt))
        raise NothingFound(
            f"a budget is exceeded in a real step whatever is picked; on this rank {readable(here + measured)} was "
            f"needed of {readable(here + allowed)} and {readable(over)} too much reserved, the last time",
            _no_answer(here + allowed),
        )

    def _over(self, step: Callable[[], object]) -> int:
        """By how many bytes more than this rank's budget some real steps reserve, which all ranks run."""
        device = self.room.device
        if self.room.budget is None or device is None:
            for _ in range(STEPS):
                step()
                self.model.zero_grad()
            return 0

        def reserved() -> int:
            try:
                return rehearsed(device, step, self.job.blocks(), self.model.zero_grad)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise  # the other ranks wait within the schedule: nothing can be tried again
                raise NothingFound(
                    f"{device.device} ran out of memory while plans were rehearsed: give a smaller budget",
                    _no_answer(self.room.budget or 0),
                ) from error

        return self.room.over_here(reserved)

    def undo(self) -> None:
        """Let the stages run as they did before."""
        for stage, unit in zip(self.stages, self.units, strict=False):
            disable(unit.module)
            if unit.halves is not None:
                stage.dw_builder = None

    def _captured(self) -> None:
        for unit in self.units:
            if unit.failed is not None:
                raise unit.failed
            if unit.step is None:
                raise CaptureError(f"{unit.name} does not run in a training step of the schedule")

    def _watched(
        self, step: Callable[[], object], planned: Sequence[Planned], points: Sequence[Point]
    ) -> tuple[int, list[Place]]:
        """The peak of a real step by these plans, above the fixed bytes, and what there was besides the stages'."""
        trace = Trace(self.device)

        def mark() -> None:
            for stage, unit, one in zip(self.stages, self.units, planned, strict=True):
                unit.run_by(trace.marked(one, stage.stage_index))
                if unit.halves is not None:
                    unit.halves.around = trace.around_second_half(stage.stage_index)

        self.ranks.gather(mark)  # a rank that refuses by itself would leave the others in the schedule
        try:
            parts = trace.least(step, self._clear)
        finally:
            for unit in self.units:
                if unit.halves is not None:
                    unit.halves.around = None
        seen = [part.label for part in parts if part.label != BETWEEN]

        def check() -> None:
            if seen != [f"{run.kind} {run.stage}" for run in self.runs]:
                raise CaptureError(
                    "a stage runs in parts, or the schedule does not run what its actions say, so what its ranks hold "
                    "is not known"
                )

        self.ranks.gather(check)
        peaks = [part.peak_bytes for part in parts]
        return max(peaks), places_of(self.moments, peaks, [point.option for point in points])

    def _clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for stage in self.stages:
            stage.clear_runtime_states()

    def _picked(self, places: Sequence[Place], allowed: int) -> tuple[list[Point], Choice]:
        """A point for each stage by the greedy curves, then among what the planner makes of what was picked."""
        points, _ = self._chosen(places, allowed)
        options = [point.option for point in points]

        def ask() -> None:
            for index, (unit, point) in enumerate(zip(self.units, points, strict=True)):
                assert unit.step is not None
                left = room(places, options, index, allowed)
                found = solved(unit.step, point, left, self.planner.asked, self.asking)
                if found is not None:
                    self.points[index].append(found)

        self.ranks.gather(self.ranks.awaited(ask))  # one whose planner fails would leave the others waiting
        return self._chosen(places, allowed)

    def _chosen(self, places: Sequence[Place], allowed: int) -> tuple[list[Point], Choice]:
        for index, points in enumerate(self.points):  # many bounds lead to one plan
            self.points[index] = list({point.option: point for point in points}.values())
        options = self._options()
        found = combinations(places, options, allowed)
        least = 0 if found else least_budget(places, options)
        told = self.ranks.gather(lambda: ([c.times for c in found], least, self.fixed_bytes))
        for rank, (times, need, fixed) in enumerate(told):
            if not times:
                raise BudgetTooSmall(
                    f"no choice of plans fits the budget of rank {rank}; {readable(fixed + need, up=True)} is known to "
                    f"do there, of which {readable(fixed)} are fixed",
                    _no_answer(self.fixed_bytes + allowed),
                )
        ranks = [[Combination(tuple(Times(*t) for t in one), ()) for one in times] for times, _, _ in told]
        choice = Choice(*self.ranks.share(lambda: list(choose(self.actions.timeline, self.actions.numbers, ranks))))
        mine = found[choice.taken[self.stages[0].group_rank]].chosen
        return [points[index] for points, index in zip(self.points, mine, strict=True)], choice

    def _options(self) -> list[list[Option]]:
        """[stages] of all known plans, what each comes to."""
        return [[point.option for point in points] for points in self.points]


def _tangents_apart(step: TrainingStep) -> TrainingStep:
    """A stage's step whose plans do not come to the gradients of its outputs: these lie in its buffers, which stay.

    So what is there besides its plans is the same from the beginning to the end of a pass, wherever a plan peaks.
    """
    ops = step.operations
    received = frozenset(ops.ops[ops.turn].makes)
    sizes = tuple(0 if storage in received else size for storage, size in enumerate(ops.sizes))
    return replace(step, operations=replace(ops, sizes=sizes))


def _more(some: Sequence[Place], others: Sequence[Place]) -> list[Place]:
    """What either of two steps needed."""
    rest = {place[:3]: place for place in some}
    return [max(place, rest[place[:3]], key=lambda p: p.rest_bytes) for place in others]


def _no_answer(budget: int) -> Answer:
    return Answer(status=Status.NOTHING_FOUND, method="pipeline", budget_bytes=max(0, budget))


def optimize_pipeline(
    stages: Any,
    schedule: Any,
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    ema: Any = None,
    options: SolveOptions | None = None,
    **fields: Unpack[StepFields],
) -> PipelinePlans:
    """Train the stages of a pipeline by plans, in place, inside one budget for each rank.

    What a rank holds at each moment is read from the actions of the schedule; the plans are chosen for all ranks
    together, so that a step of the schedule takes the least time. Some steps of the schedule are run for that, and the
    caller's parameters, buffers, gradients and random state are left as they were. Call it on every rank, after the
    schedule is made and before its first step. Nothing is planned while the schedule runs, so that no rank waits for
    another one's plan; micro-batches of another size are planned by each rank alone, within what their stage has got.

    Args:
        stages: this rank's `PipelineStage`, or a list of them.
        schedule: one of `torch.distributed.pipelining`, of these stages: `ScheduleGPipe`, `Schedule1F1B`,
            `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, or your own.
        example_args, example_kwargs: one batch, as this rank gives it to `schedule.step`: inputs on the first stage's
            rank, `target=` on the last one's.
        budget: of this rank, as for `remat.optimize`; a fraction is one of what the rank needs without a plan besides
            the fixed bytes, with this schedule. Bytes of an accelerator are those that its driver has to give: three
            more steps show what is reserved.
        planner: as for `remat.optimize`; each rank asks for its own stages.
        optimizer, ema: of this rank's parameters, as for `remat.optimize`.
        options, fields: those of `remat.SolveOptions` that concern a step and its plan, for each solve of the
            planner's; without an object, 20 seconds and a gap of 0.01 for each.

    Raises:
        CaptureError: a stage cannot be captured, on some rank.
        BudgetTooSmall: no choice of plans fits some rank's budget; the message says which, and what is enough.
        NothingFound: the measured peak stayed over a budget.
        RematError: the planner of some rank failed, and may not be passed over; every rank hears why.
        InvalidData: not stages or a schedule of theirs, not a budget of a rank, not a planner, or not an option.
        RuntimeError: torch.distributed is not initialized, or remat is enabled on a stage already.
    """
    asking = solve_options(optimize_pipeline, StepFields, options, fields, default=EACH)
    check_functional(asking.functional_ops)
    if asking.link is not None:
        raise InvalidData("optimize_pipeline looks for plans that move nothing to the host: leave link= out")
    budget = read_budget(budget)
    if isinstance(budget, UnitBytes):
        raise InvalidData(f"the budget of a rank is bytes or a share of what it needs, not {budget!r}")
    if asking.ranks is not False or isinstance(planner, RankPlanner):
        raise InvalidData(
            "each rank of a pipeline runs stages of its own, and plans them by itself: leave ranks= out, and give no "
            "RankPlanner"
        )
    own = _stages(stages)
    if not dist.is_initialized():
        raise RuntimeError("optimize_pipeline needs torch.distributed: call init_process_group first")
    ranks = Ranks(own[0].group)
    begun: list[tuple[Search, tuple[Any, ...], Mapping[str, Any]]] = []

    def begin() -> None:
        args, kwargs = example_call(example_args, example_kwargs)
        job = Job(optimizer, ema)
        begun.append((Search(own, schedule, planner_of(planner, asking), asking, job, ranks), args, kwargs))

    try:
        ranks.gather(begin)  # a rank that refuses by itself would leave the others in the schedule
        ((search, args, kwargs),) = begun
        with undisturbed(search.model):
            plans = search.run(lambda: schedule.step(*args, **kwargs), budget, (args, kwargs))
    except BaseException:
        for search, *_ in begun:
            search.undo()
        raise
    warn_of_update(search.job, plans.update_peak_bytes, plans.budget_bytes)
    return plans


def _stages(stages: Any) -> list[Any]:
    """The stages of this rank as a list.

    Raises:
        InvalidData: they are none.
    """
    own = list(stages) if isinstance(stages, Iterable) else [stages]
    for stage in own:
        if not (hasattr(stage, "submod") and hasattr(stage, "stage_index")):
            raise InvalidData(f"stages are torch.distributed.pipelining.PipelineStage, not {type(stage).__name__}")
    if not own:
        raise InvalidData("there are no stages to plan")
    return own
