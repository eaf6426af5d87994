"""Will a pipeline fit? What each rank of it needs on a named device, without plans and with them, from fake tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from remat_ir import Answer, Graph, InvalidData, Plan, Status, checkpointed, overhead_of, plain_plan, readable

from ..capture.dataflow import tensors
from ..compile.plans import Point, curve, point_of, solved
from ..device import NAMED
from ..pipelines.choice import (
    Passed,
    Place,
    buffers_bytes,
    choose,
    combinations,
    least_budget,
    passed,
    peak_of,
    places_by_actions,
    room,
    times_of,
)
from ..pipelines.schedule import Actions, Run, named
from ..planning.division import Option
from ..profiling.fixed import all_gradients
from ..profiling.timing import affine
from ..training.backward import Halves
from ..training.job import Job
from ..training.step import TrainingStep, training_step
from .batches import Batch, Family, figures_of, largest, largest_that, step_between
from .build import Built, build, tracing_for
from .devices import Target
from .price import price, unsized
from .step import Asked, Parallel, Parts, optimizer_of


class Stage(NamedTuple):
    """A stage of a pipeline, captured, and the bytes of what it is given and gives."""

    built: Built
    step: TrainingStep
    passed: Passed


class Update(NamedTuple):
    """What the optimizer of a rank takes: by name throughout, and while it steps with all gradients there."""

    fixed: Mapping[str, int]
    beside_bytes: int

    @classmethod
    def of(cls, stages: Sequence[Stage], optimizer: str | None) -> Update:
        """That of the stages of a rank; the batch has no part in it."""
        model = nn.ModuleList([stage.built.model for stage in stages])
        job = Job(optimizer_of(model, optimizer))
        update = job.update()
        beside = update.temporaries_bytes - update.beside_passes_bytes
        return cls(job.fixed(model), all_gradients(model) + beside)


class Rank:
    """One rank: its stages, what there is besides their plans, and the plans that it knows for them.

    Attributes:
        points: [stages] the plans.
        fixed: bytes that are there throughout, by what they are.
    """

    def __init__(self, runs: Sequence[Run], stages: Mapping[int, Stage], update: Update, actions: Actions) -> None:
        self.stages = stages
        sizes = {number: stage.passed for number, stage in stages.items()}
        own = [run for run in runs if run.kind != "weight" or stages[run.stage].step.halves is not None]
        self.places: list[Place] = places_by_actions(own, sizes, actions.last, actions.waits_at_end)
        self.points: list[list[Point]] = [[] for _ in stages]
        fixed: dict[str, int] = {}
        for stage in stages.values():
            for name, size in stage.step.fixed.items():
                fixed[name] = fixed.get(name, 0) + size
        fixed.update(update.fixed)
        fixed["inputs"] = buffers_bytes(sizes, actions.micros, actions.last)
        self.fixed = {name: size for name, size in fixed.items() if size and name != "gradients"}
        self.fixed_bytes = sum(self.fixed.values())
        self.update_bytes = self.fixed_bytes + update.beside_bytes

    @property
    def options(self) -> list[list[Option]]:
        """[stages] of all known plans, what each comes to."""
        return [[point.option for point in points] for points in self.points]

    @property
    def plain(self) -> list[Option]:
        """[stages] what they come to without plans."""
        return [point_of(s.step, plain_plan(s.step.graph)).option for s in self.stages.values()]

    @property
    def plain_bytes(self) -> int:
        """Its peak without plans."""
        return self.fixed_bytes + peak_of(self.places, self.plain)

    @property
    def least_bytes(self) -> int:
        """The least peak of known plans."""
        return self.fixed_bytes + least_budget(self.places, self.options)

    def planned_bytes(self, picked: Sequence[int]) -> int:
        """Its peak by plans that were picked."""
        options = [ways[index] for ways, index in zip(self.options, picked, strict=True)]
        return self.fixed_bytes + peak_of(self.places, options)

    def ask(self, picked: Sequence[int], asked: Asked) -> None:
        """Let the planner make what it can of plans that were picked."""
        points = [points[index] for points, index in zip(self.points, picked, strict=True)]
        options = [point.option for point in points]
        for index, (stage, point) in enumerate(zip(self.stages.values(), points, strict=True)):
            left = room(self.places, options, index, asked.memory_bytes - self.fixed_bytes)
            found = solved(stage.step, point, left, asked.planner.asked, asked.options)
            if found is not None:
                self.points[index].append(found)


class Pipeline:
    """The ranks of a pipeline, whose stages have the plans that they may take; none are known at first."""

    def __init__(self, actions: Actions, stages: Mapping[int, Stage], updates: Sequence[Update]) -> None:
        self.actions = actions
        given = zip(actions.runs, actions.numbers, updates, strict=True)
        self.ranks = [Rank(runs, {n: stages[n] for n in mine}, u, actions) for runs, mine, u in given]

    def know(self, plans: Mapping[int, Sequence[Plan]]) -> None:
        """Plans of the stages, by number, that were made for other sizes or for these."""
        for rank in self.ranks:
            for points, (number, stage) in zip(rank.points, rank.stages.items(), strict=True):
                points += [point_of(stage.step, plan) for plan in plans[number]]

    def plan(self) -> None:
        """Greedy plans of all stages at several bounds; equal stages have equal ones."""
        known: dict[Graph, list[Point]] = {}
        for rank in self.ranks:
            for points, stage in zip(rank.points, rank.stages.values(), strict=True):
                graph = stage.step.graph
                if graph not in known:
                    ends = point_of(stage.step, checkpointed(graph)), point_of(stage.step, plain_plan(graph))
                    known[graph] = curve(stage.step, ends)
                points += known[graph]

    @property
    def plans(self) -> dict[int, list[Plan]]:
        """By stage, those that are known."""
        found = [zip(rank.stages, rank.points, strict=True) for rank in self.ranks]
        return {number: [point.plan for point in points] for own in found for number, points in own}

    def chosen(self, budget: int) -> tuple[int, list[tuple[int, ...]]] | None:
        """The least makespan inside a budget of each rank, and the plans that each rank's stages take."""
        found = [combinations(rank.places, rank.options, budget - rank.fixed_bytes) for rank in self.ranks]
        if not all(found):
            return None
        choice = choose(self.actions.timeline, self.actions.numbers, found)
        return choice.makespan_ns, [ways[taken].chosen for ways, taken in zip(found, choice.taken, strict=True)]

    def planned(self, asked: Asked) -> tuple[int, list[tuple[int, ...]]] | None:
        """What is chosen for the device's memory, once the planner has made what it can of the first choice."""
        picked = self.chosen(asked.memory_bytes)
        if picked is None or self.plain_bytes <= asked.memory_bytes:
            return picked
        for rank, chosen in zip(self.ranks, picked[1], strict=True):
            rank.ask(chosen, asked)
        return self.chosen(asked.memory_bytes)

    @property
    def plain_bytes(self) -> int:
        """The peak without plans of the rank that needs most."""
        return max(rank.plain_bytes for rank in self.ranks)

    @property
    def plain_ns(self) -> int:
        """The makespan without plans."""
        return self.actions.makespan_ns([[times_of(option) for option in rank.plain] for rank in self.ranks])


def captured_stages(
    asked: Asked, actions: Actions, batch: int | None, like: Mapping[int, Stage] | None = None
) -> dict[int, Stage]:
    """All stages of a pipeline by number, for a micro-batch.

    Args:
        like: those of another micro-batch, whose kernels form the same ops where they are the same ones.

    Raises:
        InvalidData: the parts of the model do not follow each other.
        CaptureError: a stage cannot be captured as one graph.
    """
    stages: dict[int, Stage] = {}
    with tracing_for(NAMED, asked.target.capability):
        for number in range(actions.last + 1):
            asked.phase(f"stage {number} of {actions.last + 1}")
            part = {"stage": number, "stages": actions.last + 1}
            built = build(asked.make_model, NAMED, batch, asked.parallel.shared | part)
            stages[number] = _captured(
                built, number, number in actions.halved, asked, None if like is None else like[number].step
            )
            _check_follows(stages, number)
    return stages


def _captured(built: Built, number: int, halved: bool, asked: Asked, like: TrainingStep | None) -> Stage:
    """A stage whose positional arguments come from the stage before it and get gradients."""
    if number:
        for tensor in tensors(built.args):
            if tensor.is_floating_point():
                tensor.requires_grad_()
    step = training_step(
        built.model,
        built.args,
        built.kwargs,
        price=lambda kernels: price(kernels, asked.target, asked.planner.profiles, asked.parallel.cp).profiled,
        halves=Halves() if halved else None,
        like=like,
    )
    sizes = passed(step.operations, step.fixed["inputs"], all_gradients(built.model), step.parameters)
    return Stage(built, step, sizes)


def _check_follows(stages: Mapping[int, Stage], number: int) -> None:
    if not number:
        return
    flow = stages[number - 1].step.operations.flow
    nodes = [r for r in flow.forward_results if r not in flow.mutated.values()]
    returned = [tuple(n.meta["val"].shape) for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    taken = [tuple(t.shape) for t in tensors(stages[number].built.args)]
    if returned != taken:
        raise InvalidData(
            f"stage {number - 1} returns tensors of shapes {returned}, and stage {number} takes {taken}: the "
            "positional arguments of a part are what the one before returns; others are given by name"
        )


def stages_between(
    one: tuple[int, Mapping[int, Stage]], other: tuple[int, Mapping[int, Stage]], size: int
) -> dict[int, Stage]:
    """The stages at a micro-batch, from those at two others: for predictions alone.

    Raises:
        CaptureError: some stage is another program there.
    """
    (low, small), (high, large) = sorted((one, other), key=lambda pair: pair[0])
    found = {}
    for number, stage in large.items():
        step = step_between((low, small[number].step), (high, stage.step), size)
        pairs = zip(small[number].passed, stage.passed, strict=True)
        found[number] = Stage(stage.built, step, Passed(*(affine(*p, low, high, size, size < high) for p in pairs)))
    return found


LARGEST = "largest micro-batch"

POINTS = 4
"""Budgets between the least one and what plain training needs, at which a curve is found."""


@dataclass(frozen=True)
class RankFit:
    """What one rank of a pipeline needs; bytes are requested ones, fixed bytes included.

    Attributes:
        stages: their numbers.
        fixed: what is there throughout: parameters, state, the batch, buffers to receive into.
        plain_bytes: the peak without plans.
        least_bytes: the least peak of known plans.
        planned_bytes: the peak by the plans for the device's memory; None: no plans fit some rank.
        update_peak_bytes: while the optimizer steps.
    """

    stages: tuple[int, ...]
    fixed: Mapping[str, int]
    plain_bytes: int
    least_bytes: int
    planned_bytes: int | None
    update_peak_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """All that is there throughout."""
        return sum(self.fixed.values())


@dataclass(frozen=True, eq=False)
class PipelineFit:
    """What the ranks of a pipeline need on a device.

    Attributes:
        name: of the last stage's class.
        batch: of a micro-batch.
        memory_bytes: what a job may fill of each device.
        ranks: in order.
        overhead: of the makespan by plans for the device's memory over the plain one; None: some rank fits by none.
        curve: what the same budget for each rank leads to, of several: the makespan is the cost.
        makespan_ns, plain_makespan_ns: of a step; messages take no time.
        largest_plain, largest_planned: micro-batches that all ranks train; None where that of the function cannot be
            chosen.
        max_overhead: the most that the plans of the largest micro-batch may cost more.
        unknown: the parts that failed, by name, and why.
        unsized: which workspaces are not known, in words: see `remat.target.price.unsized`.
    """

    name: str
    target: Target
    batch: int | None
    optimizer: str | None
    parallel: Parallel
    memory_bytes: int
    ranks: tuple[RankFit, ...]
    overhead: float | None
    curve: tuple[Answer, ...]
    makespan_ns: int | None
    plain_makespan_ns: int
    largest_plain: int | None
    largest_planned: Batch | None
    max_overhead: float
    seconds: float
    unknown: Mapping[str, str] = field(default_factory=dict)
    unsized: str = ""

    @property
    def plain_bytes(self) -> int:
        """The peak without plans of the rank that needs most."""
        return max(rank.plain_bytes for rank in self.ranks)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """One line a rank: its stages, what is fixed, and its peaks; the first line says what is in the columns."""
        head: tuple[str, ...] = ("rank", "stages", "fixed", "plain", "least", "by a plan", "optimizer's step")
        found: list[tuple[str, ...]] = [head if self.optimizer is not None else head[:-1]]
        for number, rank in enumerate(self.ranks):
            planned = "none fits" if rank.planned_bytes is None else readable(rank.planned_bytes)
            sizes = rank.fixed_bytes, rank.plain_bytes, rank.least_bytes
            row: tuple[str, ...] = (str(number), ", ".join(map(str, rank.stages)), *map(readable, sizes), planned)
            found.append((*row, readable(rank.update_peak_bytes)) if self.optimizer is not None else row)
        return found

    @property
    def ending(self) -> str:
        """Whether it fits, as a sentence."""
        over = self._update_over
        if over:
            return f"does not fit: the optimizer's step of rank {over[0]} needs more, whatever the plans"
        if self.plain_bytes <= self.memory_bytes:
            return "fits without a plan"
        if self.overhead is None:
            worst = max(range(len(self.ranks)), key=lambda n: self.ranks[n].least_bytes)
            return f"does not fit: no plans are known for rank {worst} that need less than its least"
        return f"fits by plans: a step of the schedule takes {100 * self.overhead:+.1f} % time"

    @property
    def fits(self) -> bool:
        """Whether plans for the device's memory are known for each rank, and the optimizer's steps fit, too."""
        return self.overhead is not None and not self._update_over

    @property
    def _update_over(self) -> list[int]:
        """The ranks whose optimizer's step needs more."""
        over = [n for n, rank in enumerate(self.ranks) if rank.update_peak_bytes > self.memory_bytes]
        return over if self.optimizer is not None else []

    @property
    def figures(self) -> dict[str, object]:
        """All of it, as JSON has it."""
        ranks = [{name: value for name, value in vars(rank).items() if name != "fixed"} for rank in self.ranks]
        return {
            "model": self.name,
            "device": self.target.name,
            "parallel": self.parallel._asdict(),
            "memory_bytes": self.memory_bytes,
            "ranks": [{**row, "fixed_bytes": dict(rank.fixed)} for row, rank in zip(ranks, self.ranks, strict=True)],
            "overhead": self.overhead,
            "makespan_ns": self.makespan_ns,
            "plain_makespan_ns": self.plain_makespan_ns,
            **figures_of(self.curve, self.largest_plain, self.largest_planned),
            "unknown": dict(self.unknown),
            "unsized": self.unsized,
            "seconds": self.seconds,
        }

    def _largest(self) -> list[str]:
        failed = [f"{name}: not known: {why}" for name, why in self.unknown.items()]
        most = self.largest_planned
        if most is None:
            return failed if self.largest_plain is None else [f"{LARGEST}: {self.largest_plain} plain", *failed]
        planned = f"{most.size} by plans at {100 * most.overhead:+.1f} % time" if most.size else "none by plans"
        return [f"{LARGEST}: {self.largest_plain} plain, {planned}; at most {100 * self.max_overhead:+.0f} %"]

    def __str__(self) -> str:
        head = f"{self.name} on {self.parallel.ranks} × {self.target.name}"
        head += "" if self.batch is None else f", micro-batch {self.batch}"
        head += "" if self.optimizer is None else f", {self.optimizer}"
        head += f", {self.parallel.micros} micro-batches by {self.parallel.schedule}"
        head += "" if self.parallel.tp == 1 else f", tp={self.parallel.tp}"
        rows = self.rows
        wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:>{size}}" for cell, size in zip(row, wide, strict=True)) for row in rows]
        end = [f"of {readable(self.memory_bytes)} for tensors on each: {self.ending}", *self._largest()]
        priced = filter(None, (f"costs: a roofline of {self.target.name}", self.unsized, f"{self.seconds:.0f} s"))
        end.append("; ".join(priced))
        if self.fits and self.plain_bytes > self.memory_bytes:
            options = "" if self.optimizer is None else ", optimizer=optimizer"
            budget = f'budget="{self.memory_bytes // 2**20}MiB"{options}'
            end.append(f"to train by plans, on each rank: remat.optimize_pipeline(stage, schedule, (x,), {budget})")
        return "\n".join([head, *lines, *end])


class PipelineBatches:
    """The stages of a pipeline by micro-batch, which plans of two captured ones go with."""

    def __init__(self, asked: Asked, first: Pipeline, updates: Sequence[Update]) -> None:
        self._asked, self._updates, self._actions = asked, updates, first.actions
        self._plans = first.plans
        known = asked.known_batch
        stages = {number: stage for rank in first.ranks for number, stage in rank.stages.items()}
        self._given = None if known is None else (known, stages)
        self._like: Mapping[int, Stage] = stages  # the last ones: a batch of one may have other kernels

    @cached_property
    def _stages(self) -> Family[Mapping[int, Stage]]:
        def capture(size: int) -> Mapping[int, Stage]:
            self._like = captured_stages(self._asked, self._actions, size, self._like)
            return self._like

        return Family(capture, stages_between, self._given)

    def plain(self) -> int:
        """The largest micro-batch that all ranks train without a plan."""
        return largest(lambda size: self._at(self._stages[size]).plain_bytes <= self._asked.memory_bytes)

    def planned(self) -> Batch:
        """The largest one for which plans are found that cost no more than is asked for, captured and planned."""
        return largest_that(self._promised, self._overhead, self._asked.max_overhead)

    def _at(self, stages: Mapping[int, Stage]) -> Pipeline:
        return Pipeline(self._actions, stages, self._updates)

    def _promised(self, size: int) -> bool:
        """Whether plans of the first micro-batch are good enough at another."""
        pipeline = self._at(self._stages[size])
        pipeline.know(self._plans)
        found = pipeline.chosen(self._asked.memory_bytes)
        return found is not None and overhead_of(found[0], pipeline.plain_ns) <= self._asked.max_overhead

    def _overhead(self, size: int) -> float | None:
        """Of the best that is found at a micro-batch that is captured for it."""
        pipeline = self._at(self._stages.captured(size))
        pipeline.know(self._plans)
        pipeline.plan()
        found = pipeline.planned(self._asked)
        return None if found is None else overhead_of(found[0], pipeline.plain_ns)


def fit_pipeline(asked: Asked) -> PipelineFit:
    """Find out what each rank of a pipeline needs: see `remat.target.fit.predict`.

    Raises:
        InvalidData: the schedule is not known or does not take so many ranks and micro-batches, or the parts of the
            model do not follow each other.
        CaptureError: a stage cannot be captured as one graph.
    """
    start, parallel = time.perf_counter(), asked.parallel
    actions = Actions(named(parallel.schedule, parallel.pp, parallel.micros))
    stages = captured_stages(asked, actions, asked.batch)
    updates = [Update.of([stages[n] for n in mine], asked.optimizer) for mine in actions.numbers]
    pipeline = Pipeline(actions, stages, updates)
    asked.phase("planning all stages at several bounds")
    pipeline.plan()
    asked.phase("planning for the device's memory")
    picked, plain_ns = pipeline.planned(asked), pipeline.plain_ns
    ranks = tuple(
        RankFit(
            tuple(rank.stages),
            rank.fixed,
            rank.plain_bytes,
            rank.least_bytes,
            None if picked is None else rank.planned_bytes(picked[1][number]),
            rank.update_bytes,
        )
        for number, rank in enumerate(pipeline.ranks)
    )
    budgets = curve_budgets(max(rank.least_bytes for rank in ranks), pipeline.plain_bytes)
    curve = tuple(_answer(budget, pipeline.chosen(budget), plain_ns) for budget in budgets)
    whole = _answer(asked.memory_bytes, picked, plain_ns)
    parts = Parts()
    largest_plain: int | None = None
    largest_planned: Batch | None = None
    if asked.batch_is_free:
        asked.phase(f"looking for the largest micro-batch; plain training needs {readable(pipeline.plain_bytes)}")
        search = PipelineBatches(asked, pipeline, updates)
        largest_plain = parts.part(LARGEST, search.plain, None)
        if largest_plain is not None:
            asked.phase(f"looking for the largest micro-batch by plans; {largest_plain} without")
            largest_planned = parts.part(f"{LARGEST} by plans", search.planned, None)
    return PipelineFit(
        stages[actions.last].built.name,
        asked.target,
        asked.batch,
        asked.optimizer,
        asked.parallel,
        asked.memory_bytes,
        ranks,
        whole.overhead,
        curve,
        whole.cost_ns,
        plain_ns,
        largest_plain,
        largest_planned,
        asked.max_overhead,
        time.perf_counter() - start,
        parts.unknown(),
        unsized(node for stage in stages.values() for node in stage.step.operations.flow.kernels),
    )


def curve_budgets(least: int, plain: int) -> list[int]:
    """The budgets of a curve, from the least one to what plain training needs."""
    return sorted({least + (plain - least) * i // POINTS for i in range(POINTS + 1)})


def _answer(budget: int, found: tuple[int, Any] | None, plain_ns: int) -> Answer:
    if found is None:
        return Answer(Status.NOTHING_FOUND, "pipeline", budget)
    return Answer(Status.FEASIBLE, "pipeline", budget, found[0], overhead=overhead_of(found[0], plain_ns))
