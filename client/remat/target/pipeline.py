"""Will a pipeline fit? What each rank of it needs on a named device, without plans and with them, from fake tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from remat_ir import Answer, Graph, InvalidData, Status, overhead_of, plain_plan
from remat_ir.greedy import checkpointed

from ..capture.dataflow import tensors
from ..device import NAMED
from ..pipelines.choice import Combination, Place, choose, combinations, least_budget, peak_of, room, times_of
from ..pipelines.ledger import Passed, buffers_bytes, passed, places_by_actions
from ..pipelines.schedule import Run, Timeline, Times, actions_of, in_halves, named
from ..planning.budget import readable
from ..planning.options import SolveOptions
from ..planning.planner import CoordinatedPlanner
from ..profiling.fixed import all_gradients
from ..training.halves import Halves
from ..training.job import Job
from ..training.step import TrainingStep, training_step
from ..units.curve import Point, curve, point_of, solved
from .build import Built, build, tracing_for
from .devices import Target
from .parallel import Parallel
from .price import price
from .step import optimizer_of

POINTS = 4
"""Budgets between the least one of the rank that needs most and its plain peak, at which the curve is found."""


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
    seconds: float

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
        over = [n for n, rank in enumerate(self.ranks) if rank.update_peak_bytes > self.memory_bytes]
        if over and self.optimizer is not None:
            return f"does not fit: the optimizer's step of rank {over[0]} needs more, whatever the plans"
        if all(rank.plain_bytes <= self.memory_bytes for rank in self.ranks):
            return "fits without a plan"
        if self.overhead is None:
            worst = max(range(len(self.ranks)), key=lambda n: self.ranks[n].least_bytes)
            return f"does not fit: no plans are known for rank {worst} that need less than its least"
        return f"fits by plans: a step of the schedule takes {100 * self.overhead:+.1f} % time"

    def __str__(self) -> str:
        head = f"{self.name} on {self.parallel.ranks} × {self.target.name}"
        head += "" if self.batch is None else f", micro-batch {self.batch}"
        head += "" if self.optimizer is None else f", {self.optimizer}"
        head += f", {self.parallel.micros} micro-batches by {self.parallel.schedule}"
        head += "" if self.parallel.tp == 1 else f", tp={self.parallel.tp}"
        rows = self.rows
        wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:>{size}}" for cell, size in zip(row, wide, strict=True)) for row in rows]
        end = f"of {readable(self.memory_bytes)} for tensors on each: {self.ending}"
        return "\n".join([head, *lines, end, f"costs: a roofline of {self.target.name}; {self.seconds:.0f} s"])


class _Stage(NamedTuple):
    built: Built
    step: TrainingStep
    passed: Passed


class _Rank:
    """One rank: its stages, what there is besides their plans, and the plans that it knows for them."""

    def __init__(
        self, runs: Sequence[Run], stages: Mapping[int, _Stage], last: int, given: Parallel, keeps: bool
    ) -> None:
        self.stages = stages
        sizes = {number: stage.passed for number, stage in stages.items()}
        own = [run for run in runs if run.kind != "weight" or stages[run.stage].step.halves is not None]
        self.places: list[Place] = places_by_actions(own, sizes, last, keeps)
        self.buffers = buffers_bytes(sizes, given.micros, last)
        self.points: list[list[Point]] = []

    def plan(self, known: dict[Graph, list[Point]]) -> None:
        """Greedy plans of all stages at several bounds; equal stages have equal ones."""
        for stage in self.stages.values():
            graph = stage.step.graph
            if graph not in known:
                ends = point_of(stage.step, checkpointed(graph)), point_of(stage.step, plain_plan(graph))
                known[graph] = curve(stage.step, ends)
            self.points.append(list(known[graph]))

    def finish(self, optimizer: str | None) -> None:
        """What is there throughout, and while the optimizer steps."""
        model = nn.ModuleList([stage.built.model for stage in self.stages.values()])
        job = Job(optimizer_of(model, optimizer))
        fixed: dict[str, int] = {}
        for stage in self.stages.values():
            for name, size in stage.step.fixed.items():
                fixed[name] = fixed.get(name, 0) + size
        fixed.update(job.fixed(model))
        fixed["inputs"] = self.buffers
        self.fixed = {name: size for name, size in fixed.items() if size and name != "gradients"}
        self.fixed_bytes = sum(self.fixed.values())
        update = job.update()
        beside = update.temporaries_bytes - update.beside_passes_bytes
        self.update_bytes = self.fixed_bytes + all_gradients(model) + beside

    def combinations(self, budget: int) -> list[Combination]:
        """What its stages may take together inside a budget, fixed bytes included."""
        return combinations(self.places, self.options, budget - self.fixed_bytes)

    @property
    def options(self) -> list[list[Any]]:
        """[stages] of all known plans, what each comes to."""
        return [[point.option for point in points] for points in self.points]

    @property
    def plain(self) -> list[Any]:
        """[stages] what they come to without plans."""
        return [point_of(s.step, plain_plan(s.step.graph)).option for s in self.stages.values()]

    def asked(self, picked: Sequence[int], budget: int, planner: Any, asking: SolveOptions) -> None:
        """Let the planner make what it can of plans that were picked."""
        points = [points[index] for points, index in zip(self.points, picked, strict=True)]
        options = [point.option for point in points]
        for index, (stage, point) in enumerate(zip(self.stages.values(), points, strict=True)):
            left = room(self.places, options, index, budget - self.fixed_bytes)
            found = solved(stage.step, point, left, planner, asking)
            if found is not None:
                self.points[index].append(found)


class _Pipeline(NamedTuple):
    timeline: Timeline
    numbers: list[list[int]]
    ranks: list[_Rank]

    def chosen(self, budget: int) -> tuple[int, list[tuple[int, ...]]] | None:
        """The least makespan inside a budget of each rank, and the plans that each rank's stages take."""
        found = [rank.combinations(budget) for rank in self.ranks]
        if not all(found):
            return None
        choice = choose(self.timeline, self.numbers, found)
        return choice.makespan_ns, [ways[taken].chosen for ways, taken in zip(found, choice.taken, strict=True)]

    def plain_ns(self) -> int:
        """The makespan without plans."""
        times: list[Times] = [Times(0, 0, 0)] * self.timeline.stages
        for numbers, rank in zip(self.numbers, self.ranks, strict=True):
            for number, option in zip(numbers, rank.plain, strict=True):
                times[number] = times_of(option)
        return self.timeline.makespan_ns(times)


def fit_pipeline(
    make_model: Callable[..., Any],
    target: Target,
    parallel: Parallel,
    *,
    optimizer: str | None = None,
    batch: int | None = None,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    phase: Callable[[str], None] = lambda _: None,
) -> PipelineFit:
    """Find out what each rank of a pipeline needs: see `remat.fit`.

    Raises:
        InvalidData: the schedule is not known or does not take so many ranks and micro-batches, or the parts of the
            model do not follow each other.
        CaptureError: a stage cannot be captured as one graph.
    """
    start = time.perf_counter()
    schedule = named(parallel.schedule, parallel.pp, parallel.micros)
    runs, halved = actions_of(schedule), in_halves(schedule)
    last = max(run.stage for own in runs for run in own)
    stages: dict[int, _Stage] = {}
    with tracing_for(NAMED):
        for number in range(last + 1):
            phase(f"stage {number} of {last + 1}")
            part = {"stage": number, "stages": last + 1}
            built = build(make_model, NAMED, batch, parallel.tp, part)
            stages[number] = _captured(built, number, number in halved, target, planner)
            _check_follows(stages, number)
    numbers = [sorted({run.stage for run in own}) for own in runs]
    keeps = not isinstance(schedule, Schedule1F1B)
    ranks = [
        _Rank(own, {n: stages[n] for n in mine}, last, parallel, keeps) for own, mine in zip(runs, numbers, strict=True)
    ]
    phase("planning all stages at several bounds")
    known: dict[Graph, list[Point]] = {}
    for rank in ranks:
        rank.plan(known)
        rank.finish(optimizer)
    pipeline = _Pipeline(Timeline(runs), numbers, ranks)
    phase("planning for the device's memory")
    return _found(pipeline, stages[last].built.name, target, parallel, optimizer, batch, planner, options, start)


def _captured(built: Built, number: int, halved: bool, target: Target, planner: CoordinatedPlanner) -> _Stage:
    """A stage whose positional arguments come from the stage before it and get gradients."""
    if number:
        for tensor in tensors(built.args):
            if tensor.is_floating_point():
                tensor.requires_grad_()
    step = training_step(
        built.model,
        built.args,
        built.kwargs,
        price=lambda kernels: price(kernels, target, planner.profiles).profiled,
        halves=Halves() if halved else None,
    )
    own = len(step.captured.params) + len(step.captured.buffers)
    return _Stage(built, step, passed(step.operations, step.fixed["inputs"], all_gradients(built.model), own))


def _check_follows(stages: Mapping[int, _Stage], number: int) -> None:
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


def _found(
    pipeline: _Pipeline,
    name: str,
    target: Target,
    parallel: Parallel,
    optimizer: str | None,
    batch: int | None,
    planner: CoordinatedPlanner,
    options: SolveOptions,
    start: float,
) -> PipelineFit:
    memory, plain_ns = target.usable_bytes, pipeline.plain_ns()
    plain = [rank.fixed_bytes + peak_of(rank.places, rank.plain) for rank in pipeline.ranks]
    picked = pipeline.chosen(memory)
    if picked is not None and max(plain) > memory:
        for rank, chosen in zip(pipeline.ranks, picked[1], strict=True):
            rank.asked(chosen, memory, planner.asked, options)
        picked = pipeline.chosen(memory)
    found = []
    for number, rank in enumerate(pipeline.ranks):
        taken = None if picked is None else [ways[i] for ways, i in zip(rank.options, picked[1][number], strict=True)]
        least = rank.fixed_bytes + least_budget(rank.places, rank.options)
        planned = None if taken is None else rank.fixed_bytes + peak_of(rank.places, taken)
        stages = tuple(rank.stages)
        found.append(RankFit(stages, rank.fixed, plain[number], least, planned, rank.update_bytes))
    low, high = max(rank.least_bytes for rank in found), max(plain)
    budgets = sorted({low + (high - low) * i // POINTS for i in range(POINTS + 1)})
    curve = tuple(_answer(budget, pipeline.chosen(budget), plain_ns) for budget in budgets)
    whole = _answer(memory, picked, plain_ns)
    figures = tuple(found), whole.overhead, curve, whole.cost_ns, plain_ns, time.perf_counter() - start
    return PipelineFit(name, target, batch, optimizer, parallel, memory, *figures)


def _answer(budget: int, found: tuple[int, Any] | None, plain_ns: int) -> Answer:
    if found is None:
        return Answer(Status.NOTHING_FOUND, "pipeline", budget)
    return Answer(Status.FEASIBLE, "pipeline", budget, found[0], overhead=overhead_of(found[0], plain_ns))
