"""The search for what each stage of a pipeline may hold: trial steps of the schedule, curves, one choice for all ranks.

A step of the schedule by the plans that hold the least is watched by the allocator's own events, cut where the passes
of the rank's stages begin and end: what is left when the plans' own bytes are taken off is the rest of the rank's, such
as buffers, messages under way, gradients and the loss. Nobody plans while the schedule runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat_ir import Answer, InvalidData, Status, checkpointed, plain_plan, readable

from ..capture.refused import fsdp_module
from ..compile.plans import Point, curve, point_of, solved
from ..compile.shared import allowed_bytes
from ..device_flags import out_of_memory
from ..distributed.ranks import Ranks
from ..errors import BudgetTooSmall, CaptureError, NothingFound
from ..planning.budget import Budget
from ..planning.coordinator import OneProcess
from ..planning.division import Option
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner
from ..profiling.room import ATTEMPTS, STEPS, Room, rehearsed
from ..training.backward import Halves
from ..training.enable import disable
from ..training.job import Job
from ..training.step import Planned, TrainingStep
from ..units.unit import Trace, Unit
from .choice import Choice, Combination, Place, choose, combinations, least_budget, peak_of, places_of, room, times_of
from .schedule import Run, Timeline, Times, actions_of, in_halves, residency
from .standing import Standing, standing

log = logging.getLogger("remat")


@dataclass(frozen=True)
class Picked:
    """What a search ends with on this rank; bytes are above the fixed ones."""

    points: Sequence[Point]
    allowed: int
    predicted: int
    measured: int
    choice: Choice
    plain_ns: int
    reserved: int | None


class Search:
    """The stages of one rank, and what the ranks agree on."""

    standing: Standing
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
        runs = actions_of(schedule)
        self.timeline = Timeline(runs)
        self.numbers = [sorted({run.stage for run in own}) for own in runs]
        own = runs[self.stages[0].group_rank]
        mine = [stage.stage_index for stage in self.stages]
        if mine != self.numbers[self.stages[0].group_rank]:
            raise InvalidData(f"this rank runs the stages {sorted({r.stage for r in own})} of the schedule, not {mine}")
        self.halved = in_halves(schedule) & set(mine)
        self.runs = [run for run in own if run.kind != "weight" or run.stage in self.halved]
        self.moments = residency(self.runs, mine)
        self.units: list[Unit] = []
        try:
            for stage in self.stages:
                self.units.append(self._unit(stage))
        except BaseException:
            self.undo()
            raise
        self.model = nn.ModuleList([unit.module for unit in self.units])
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _unit(self, stage: Any) -> Unit:
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
        unit = Unit(name, module, self.planner, self.asking, halves, on_failure="plain")
        if halves is not None:
            stage.dw_builder = halves.builder
        return unit

    def run(self, step: Callable[[], Any], budget: Budget, given: Any) -> Picked:
        """Trial, curves, choice and check; see `optimize_pipeline`."""
        step()  # captures each stage in its call, and makes what first steps make
        self.ranks.gather(self._captured)
        for stage, unit in zip(self.stages, self.units, strict=True):
            if unit.step is not None and not stage.is_last:
                unit.step = _tangents_apart(unit.step)
        least = [point_of(u.step, checkpointed(u.step.graph)) for u in self.units if u.step]
        plain = [point_of(u.step, plain_plan(u.step.graph)) for u in self.units if u.step]
        _, places = self._watched(step, [unit.first for unit in self.units], least)
        self.standing = standing(self.stages, self.model, self.job, given)
        allowed = self._allowed(budget, peak_of(places, [p.option for p in plain]))
        self.plain_ns = self.timeline.makespan_ns(self._gathered_times(plain))
        self.points = [
            curve(u.step, ends) for u, ends in zip(self.units, zip(least, plain, strict=True), strict=True) if u.step
        ]
        return self._settled(step, places, allowed)

    def _allowed(self, budget: Budget, plain: int) -> int:
        """The bytes above the fixed ones that a budget leaves; on an accelerator, what others take is not there."""
        self._clear()  # what is there now is then what is there throughout
        self.room = Room(self.device, budget, self.asking.slack, OneProcess())
        fixed, absent = self.standing.fixed_bytes, sum(self.job.blocks().state)
        allowed = allowed_bytes(budget, self.asking.slack, fixed, plain)
        return self.room.left(fixed + allowed, fixed - absent) - fixed

    def _settled(self, step: Callable[[], Any], places: Sequence[Place], allowed: int) -> Picked:
        """Picks that hold in real steps: what is over in one counts for the next ones."""
        rehearses = self.ranks.most([int(self.room.budget is not None)]) == [1]
        here = self.standing.fixed_bytes
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
                return Picked(points, allowed, predicted, measured, choice, self.plain_ns, self.room.seen)
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

    def _over(self, step: Callable[[], Any]) -> int:
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
        self, step: Callable[[], Any], planned: Sequence[Planned], points: Sequence[Point]
    ) -> tuple[int, list[Place]]:
        """The peak of a real step by these plans, above the fixed bytes, and what there was besides the stages'."""
        trace = Trace(self.device)

        def mark() -> None:
            for index, (unit, one) in enumerate(zip(self.units, planned, strict=True)):
                unit.run_by(trace.marked(one, index))
                if unit.halves is not None:
                    unit.halves.around = trace.around_second_half(index)

        self.ranks.gather(mark)  # a rank that refuses by itself would leave the others in the schedule
        try:
            stretches = trace.least(step, self._clear)
        finally:
            for unit in self.units:
                if unit.halves is not None:
                    unit.halves.around = None
        seen = [Run(s.kind, self.stages[s.unit].stage_index, 0) for s in stretches if s.kind != "between"]

        def check() -> None:
            if [run[:2] for run in seen] != [run[:2] for run in self.runs]:
                raise CaptureError(
                    "a stage runs in parts, or the schedule does not run what its actions say, so what its ranks hold "
                    "is not known"
                )

        self.ranks.gather(check)
        peaks = [stretch.peak_bytes for stretch in stretches]
        return max(peaks), places_of(self.moments, peaks, [point.option for point in points])

    def _clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for stage in self.stages:
            stage.clear_runtime_states()

    def _picked(self, places: Sequence[Place], allowed: int) -> tuple[list[Point], Choice]:
        """A point for each stage by the greedy curves, then among what the planner makes of what was picked."""
        points, _ = self._chosen(places, allowed)
        options = [point.option for point in points]
        for index, (unit, point) in enumerate(zip(self.units, points, strict=True)):
            assert unit.step is not None
            left = room(places, options, index, allowed)
            found = solved(unit.step, point, left, self.planner.asked, self.asking)
            if found is not None:
                self.points[index].append(found)
        return self._chosen(places, allowed)

    def _chosen(self, places: Sequence[Place], allowed: int) -> tuple[list[Point], Choice]:
        for index, points in enumerate(self.points):  # many bounds lead to one plan
            self.points[index] = list({point.option: point for point in points}.values())
        options = self._options()
        found = combinations(places, options, allowed)
        least = 0 if found else least_budget(places, options)
        told = self.ranks.gather(lambda: ([c.times for c in found], least, self.standing.fixed_bytes))
        for rank, (times, need, fixed) in enumerate(told):
            if not times:
                raise BudgetTooSmall(
                    f"no choice of plans fits the budget of rank {rank}; {readable(fixed + need, up=True)} is known to "
                    f"do there, of which {readable(fixed)} are fixed",
                    _no_answer(self.standing.fixed_bytes + allowed),
                )
        ranks = [[Combination(tuple(Times(*t) for t in one), ()) for one in times] for times, _, _ in told]
        choice = Choice(*self.ranks.share(lambda: list(choose(self.timeline, self.numbers, ranks))))
        mine = found[choice.taken[self.stages[0].group_rank]].chosen
        return [points[index] for points, index in zip(self.points, mine, strict=True)], choice

    def _options(self) -> list[list[Option]]:
        """[stages] of all known plans, what each comes to."""
        return [[point.option for point in points] for points in self.points]

    def _gathered_times(self, points: Sequence[Point]) -> list[Times]:
        """[stages] of all ranks, by these plans."""
        told = self.ranks.gather(lambda: [times_of(point.option) for point in points])
        found: list[Times] = [Times(0, 0, 0)] * self.timeline.stages
        for numbers, times in zip(self.numbers, told, strict=True):
            for number, one in zip(numbers, times, strict=True):
                found[number] = Times(*one)
        return found


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
