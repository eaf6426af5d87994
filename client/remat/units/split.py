"""The search for what each unit of a model may hold: a trial step, curves, picks, and a step that checks them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from remat_ir import (
    Answer,
    Plan,
    Problem,
    Status,
    checkpointed,
    plain_plan,
    problem_digest,
    readable,
)

from ..compile.curve import Point, curve, point_of, unit_problem
from ..errors import BudgetTooSmall, NothingFound
from ..planning.allot import Place, allot, least_budget, peak_of
from ..planning.budget import ActivationBytes, Budget, Fraction, UnitBytes, bytes_of, device_budget
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner
from ..profiling.room import Room, rehearsed
from ..training.enable import disable
from ..training.job import Job
from ..training.planned import Planned
from ..training.reserved import Whole
from ..training.step import TrainingStep
from .trial import Rest, Trace, rest_of
from .unit import UNBOUNDED, Unit

log = logging.getLogger("remat")

MOST_TRIES = 4
"""Steps by picked plans that are watched before a budget that does not hold is given up."""


@dataclass(frozen=True)
class UnitPlans:
    """What the units of a model got of its budget.

    Attributes:
        units: by name, in the order in which they run.
        overhead: of the units' plans over their plain ones, predicted.
        budget_bytes, predicted_bytes, measured_bytes: the whole model's, fixed bytes included.
        reserved_bytes: the most that torch's allocator reserves for training by the plans, as some steps did, where the
            budget was one of a device's bytes; else None.
        fixed_bytes: parameters, buffers, inputs, optimizer state, gradients that existed.
        distinct: how many different graphs the units have.
        solves: how many times the planner was asked.
    """

    units: Mapping[str, UnitBytes]
    overhead: float
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    fixed_bytes: int
    distinct: int
    solves: int
    reserved_bytes: int | None = None

    def __str__(self) -> str:
        reserved = "" if self.reserved_bytes is None else f", {readable(self.reserved_bytes)} reserved"
        return (
            f"{len(self.units)} units, {self.distinct} of them different, within {readable(self.budget_bytes)}: "
            f"overhead {100 * self.overhead:.1f} %, peak {readable(self.predicted_bytes)} predicted, "
            f"{readable(self.measured_bytes)} measured{reserved}"
        )


class Pick(NamedTuple):
    """A point of the greedy curve of a graph, and the bounds within which the planner may do better."""

    graph: int
    point: int
    peak_bytes: int
    held_bytes: int


class Split:
    """The search for one model: trial, curves, picks, check."""

    def __init__(
        self,
        model: nn.Module,
        named: Mapping[str, nn.Module],
        planner: CoordinatedPlanner,
        asking: SolveOptions,
        job: Job,
    ) -> None:
        self.model, self.planner, self.asking, self.job = model, planner, asking, job
        self.coordinator = planner.coordinator
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.units: list[Unit] = []
        try:
            for name, module in named.items():
                self.units.append(Unit(name, module, planner, asking))
        except BaseException:
            for unit in self.units:
                disable(unit.module)
            raise
        self.solved: dict[Pick, list[Point]] = {}
        """What was made of each pick; every rank has the same."""
        self.solves = 0

    def run(self, step: Callable[[], Any], budget: Budget, fixed: int) -> UnitPlans:
        """Trial, picks and check; see `optimize_units`."""
        room = Room(self.device, budget, self.asking.slack, self.coordinator)
        step()  # captures each unit in its call, and makes what first steps make
        missing = [unit.name for unit in self.units if unit.step is None]
        if missing:
            rest_of([], [], missing)
        self._class_units()
        _, rest = self._watched(step, [unit.first for unit in self.units], self.least)
        plain = peak_of(rest.before_bytes, rest.places, [self.plain[u].option for u in rest.order])
        (allowed,) = self.coordinator.least([allowed_bytes(budget, self.asking.slack, fixed, plain)])
        allowed = room.left(fixed + allowed, fixed - sum(self.job.blocks().state)) - fixed
        for attempt in range(MOST_TRIES):
            points = self._picked(rest, allowed, fixed)
            planned = [unit.carried_out(p.size, p.plan) for unit, p in zip(self.units, points, strict=True)]
            predicted = peak_of(rest.before_bytes, rest.places, [points[u].option for u in rest.order])
            measured, seen = self._watched(step, planned, points)
            log.info("units: peak %s predicted, %s measured", readable(fixed + predicted), readable(fixed + measured))
            over = room.over(partial(self._reserved, room, step)) if measured <= allowed else 0
            if measured <= allowed and not over:
                whole = None if room.budget is None else Whole(self.model, self.job, room.budget)
                for unit, point, made in zip(self.units, points, planned, strict=True):
                    unit.run_by(made)
                    unit.size, unit.whole = point.size, whole
                found = self._result(rest, points, fixed, (allowed, predicted, measured))
                return replace(found, reserved_bytes=room.seen)
            rest = _more(rest, seen)
            allowed = min(allowed, predicted) - (over << attempt) if over else allowed  # as `lowered` does it
        raise NothingFound(
            f"the budget is exceeded in a real step whatever was picked: {readable(fixed + measured)} of "
            f"{readable(fixed + allowed)} the last time, and {readable(over)} too much reserved",
            _no_answer(fixed + allowed),
        )

    def _reserved(self, room: Room, step: Callable[[], Any]) -> int:
        """The reserved bytes of real steps; the units run by what they ran by last."""
        assert room.device is not None
        return rehearsed(room.device, step, self.job.blocks(), self.model.zero_grad)

    def _class_units(self) -> None:
        """Number the different graphs; units of one graph share curves and solves."""
        numbers: dict[str, int] = {}
        self.steps: list[TrainingStep] = []
        self.number: list[int] = []
        for unit in self.units:
            assert unit.step is not None
            digest = problem_digest(Problem(unit.step.graph.with_fixed(0), UNBOUNDED))
            if digest not in numbers:
                numbers[digest] = len(self.steps)
                self.steps.append(unit.step)
            self.number.append(numbers[digest])
        self.ends = [(point_of(s, checkpointed(s.graph)), point_of(s, plain_plan(s.graph))) for s in self.steps]
        self.least = [self.ends[n][0] for n in self.number]
        self.plain = [self.ends[n][1] for n in self.number]
        self.curves: list[list[Point]] | None = None

    def _watched(
        self, step: Callable[[], Any], planned: Sequence[Planned], points: Sequence[Point]
    ) -> tuple[int, Rest]:
        """The peak of a real step by these plans, above the fixed bytes, and what there was besides the units."""
        trace = Trace(self.device)
        for index, (unit, one) in enumerate(zip(self.units, planned, strict=True)):
            unit.run_by(trace.marked(one, index))
        stretches = trace.least(step, self.model.zero_grad)
        rest = rest_of(stretches, [point.option for point in points], [unit.name for unit in self.units])
        peak = max(stretch.peak_bytes for stretch in stretches)
        found = self.coordinator.most([peak, rest.before_bytes, *(n for p in rest.places for n in p)])
        peak, before, *numbers = found
        places = tuple(Place(*numbers[i : i + 3]) for i in range(0, len(numbers), 3))
        return peak, Rest(rest.order, before, places)

    def _picked(self, rest: Rest, allowed: int, fixed: int) -> list[Point]:
        """A point for each unit, by the greedy curves first, then among what the planner made of what they picked."""
        picks = self.coordinator.share(lambda: self._first_picks(rest, allowed, fixed))
        if isinstance(picks, str):
            raise BudgetTooSmall(picks, _no_answer(fixed + allowed))
        for pick in dict.fromkeys(Pick(*numbers) for numbers in picks):
            if pick not in self.solved:
                self.solved[pick] = self._solved(pick)
        options = [
            [p for pick, points in self.solved.items() if pick.graph == self.number[u] for p in points]
            for u in rest.order
        ]
        chosen = allot(rest.places, [[p.option for p in points] for points in options], allowed)
        assert chosen is not None, "the greedy plans are among the points"
        found = dict(zip(rest.order, (points[i] for points, i in zip(options, chosen, strict=True)), strict=True))
        return [found[u] for u in range(len(self.units))]

    def _first_picks(self, rest: Rest, allowed: int, fixed: int) -> list[Pick] | str:
        """One for each unit, by greedy plans; or why there is no choice. On the first rank only."""
        if self.curves is None:
            self.curves = [curve(step, ends) for step, ends in zip(self.steps, self.ends, strict=True)]
        curves = self.curves
        options = [[p.option for p in curves[self.number[u]]] for u in rest.order]
        chosen = allot(rest.places, options, allowed) if rest.before_bytes <= allowed else None
        if chosen is None:
            least = least_budget(rest.before_bytes, rest.places, options)
            return (
                f"no choice of the units' plans fits {readable(fixed + allowed)}; {readable(fixed + least, up=True)} "
                f"is enough, of which {readable(fixed)} are fixed"
            )
        index = dict(zip(rest.order, chosen, strict=True))
        # a plan that several units take may fill what the one with the least room has
        room: dict[tuple[int, int], int] = {}
        held = 0
        for u, place in zip(rest.order, rest.places, strict=True):
            key = self.number[u], index[u]
            left = allowed - held - max(place.forward_bytes, place.backward_bytes)
            room[key] = min(left, room.get(key, left))
            held += curves[self.number[u]][index[u]].option.held_bytes
        picks = []
        for u, number in enumerate(self.number):
            size = curves[number][index[u]].size
            peak = max(bytes_of(size.peak), room[number, index[u]])
            picks.append(Pick(number, index[u], peak, bytes_of(size.held)))
        return picks

    def _solved(self, pick: Pick) -> list[Point]:
        """The greedy plan that was picked and the planner's within its bounds, the same ones on every rank."""
        step, size = self.steps[pick.graph], UnitBytes(pick.peak_bytes, pick.held_bytes)
        problem = unit_problem(step.graph, size)

        def greedy() -> Answer:
            assert self.curves is not None
            return Answer.of_plan(problem, self.curves[pick.graph][pick.point].plan, method="greedy")

        found = [self.coordinator.answer(problem, greedy)]
        if found[0].cost_ns != step.graph.total_cost_ns:
            self.solves += 1
            found.append(self.planner.plan(problem, self.asking))
        return [point_of(step, answer.plan, size) for answer in found if isinstance(answer.plan, Plan)]

    def _result(self, rest: Rest, points: Sequence[Point], fixed: int, above: tuple[int, int, int]) -> UnitPlans:
        plain = sum(self.steps[n].graph.total_cost_ns for n in self.number)
        cost = sum(point.option.cost_ns for point in points)
        allowed, predicted, measured = above
        return UnitPlans(
            units={self.units[u].name: points[u].size for u in rest.order},
            overhead=cost / max(1, plain) - 1,
            budget_bytes=fixed + allowed,
            predicted_bytes=fixed + predicted,
            measured_bytes=fixed + measured,
            fixed_bytes=fixed,
            distinct=len(self.steps),
            solves=self.solves,
        )


def _more(one: Rest, other: Rest) -> Rest:
    """What either of two steps needed."""
    places = tuple(
        Place(*(max(pair) for pair in zip(a, b, strict=True))) for a, b in zip(one.places, other.places, strict=True)
    )
    return Rest(one.order, max(one.before_bytes, other.before_bytes), places)


def allowed_bytes(budget: Budget, slack: float, fixed: int, plain: int) -> int:
    """The bytes above the fixed ones that a budget leaves."""
    if isinstance(budget, Fraction):
        return int(budget.fraction * plain)
    if isinstance(budget, ActivationBytes):
        return bytes_of(budget.size)
    size = device_budget(budget, slack)
    assert isinstance(size, int), "see optimize_units"
    return size - fixed


def _no_answer(budget: int) -> Answer:
    return Answer(status=Status.NOTHING_FOUND, method="units", budget_bytes=max(0, budget))
