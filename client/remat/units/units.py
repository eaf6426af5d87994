"""One budget for a model whose units are planned apart: what each of them may hold, chosen for the whole.

A step by the plans that hold the least is watched by the allocator's own events, cut where units begin and end: what
is left when the units' own bytes are taken off is the rest of the model's, whatever that is. The plans of each unit at
several bounds give its trade-off, `allot` picks one of each, and the planner is asked for what was picked. A step by
those is watched again; where the budget did not hold, what was seen counts for the next picks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from remat_ir import Answer, InvalidData, Plan, Problem, Status, checkpointed, plain_plan, problem_digest, readable

from ..capture.call import example_call
from ..capture.operations import check_functional
from ..compile.plans import UNBOUNDED, Point, curve, point_of, unit_problem
from ..compile.shared import allowed_bytes
from ..distributed import planner_of
from ..errors import BudgetTooSmall, NothingFound
from ..planning.budget import Budget, UnitBytes, bytes_of, read_budget
from ..planning.division import Place, allot, least_budget, peak_of
from ..planning.options import SolveOptions, StepFields, solve_options
from ..planning.planner import CoordinatedPlanner, Planner
from ..profiling.fixed import resident
from ..profiling.measure import forward_backward
from ..profiling.room import Room, rehearsed
from ..training.compared import undisturbed
from ..training.enable import disable
from ..training.job import Job
from ..training.memory import Whole
from ..training.step import Planned, TrainingStep
from .unit import Rest, Trace, Unit, rest_of

log = logging.getLogger("remat")


EACH = SolveOptions(time_limit_s=20.0, max_gap=0.01)
"""The defaults here: several graphs are solved, and one plan of each is picked."""


def optimize_units(
    model: nn.Module,
    units: Iterable[nn.Module],
    example_args: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget,
    planner: Planner | str | None = None,
    optimizer: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[StepFields],
) -> UnitPlans:
    """Train units of a model by plans of their own, in place, inside one budget for the whole model.

    For FSDP2, where each unit is gathered by itself, and for DDP, which can send a unit's gradients while the one
    before it runs. What each unit may hold is chosen so that what all of them hold and what the one at work needs stay
    inside the budget, at the least total cost. Three steps or more are run for that, and the caller's parameters,
    buffers, gradients and random state are left as they were. Call it after `fully_shard`, on every rank, and before
    DDP wraps the model. Calls of other sizes are planned when they are first seen, within what their unit has got.

    Args:
        units: modules of the model that run once in a step, one after the other, such as its blocks.
        example_args, example_kwargs: the largest batch; one call of the model.
        budget: as for `remat.optimize`; a fraction is one of what plain training needs besides the fixed bytes. Bytes
            of an accelerator are those that its driver has to give: three more steps show what is reserved.
        planner: as for `remat.optimize`.
        loss: from the model's output to the scalar that is differentiated; by default the output, its `loss` or its
            first entry.
        options, fields: those of `remat.SolveOptions` that concern a step and its plan, for each solve of the
            planner's; without an object, 20 seconds and a gap of 0.01 for each.

    Raises:
        CaptureError: a unit cannot be captured, or does not run once in a step; the message names it.
        BudgetTooSmall: no choice of plans fits; the message says what is enough.
        NothingFound: the measured peak stayed over the budget.
        InvalidData: not a budget of a whole model, no units of it, not a planner, not an optimizer, or not an option;
            before anything runs.
        RuntimeError: remat is enabled on a unit already.
    """
    asking = solve_options(optimize_units, StepFields, options, fields, default=EACH)
    check_functional(asking.functional_ops)
    budget = read_budget(budget)
    if isinstance(budget, UnitBytes):
        raise InvalidData(f"the budget of a whole model is bytes or a share of what it needs, not {budget!r}")
    job = Job(optimizer)
    split = Split(model, _named(model, units), planner_of(planner, asking), asking, job)
    args, kwargs = example_call(example_args, example_kwargs)
    fixed = sum(resident(model, (args, kwargs), {}).values()) + sum(job.fixed(model).values())
    try:
        with undisturbed(model):
            return split.run(forward_backward(model, args, kwargs, loss), budget, fixed)
    except BaseException:
        for unit in split.units:
            disable(unit.module)
        raise


def _named(model: nn.Module, units: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The units by their names in the model.

    Raises:
        InvalidData: none, one that is no part of the model, or one inside another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for number, unit in enumerate(units):
        name = names.get(id(unit))
        if not name:
            raise InvalidData(f"unit {number}, a {type(unit).__name__}, is no part of this {type(model).__name__}")
        found[name] = unit
    if not found:
        raise InvalidData(f"there are no units of this {type(model).__name__} to plan")
    for name in found:
        outer = next((other for other in found if name.startswith(other + ".")), None)
        if outer is not None:
            raise InvalidData(f"{name} is a part of {outer}: units must not lie inside each other")
    return found


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

    def run(self, step: Callable[[], object], budget: Budget, fixed: int) -> UnitPlans:
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

    def _reserved(self, room: Room, step: Callable[[], object]) -> int:
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
        self, step: Callable[[], object], planned: Sequence[Planned], points: Sequence[Point]
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


def _no_answer(budget: int) -> Answer:
    return Answer(status=Status.NOTHING_FOUND, method="units", budget_bytes=max(0, budget))
