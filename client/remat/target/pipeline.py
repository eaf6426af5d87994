"""Will a pipeline fit? What each rank of it needs on a named device, without plans and with them, from fake tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_ir import Answer, Status, overhead_of, readable

from .asked import Asked
from .batches import Batch, Family, largest, largest_that
from .devices import Target
from .parallel import Parallel
from .stages import Actions, Pipeline, Stage, Update, captured_stages, stages_between

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
        largest_plain, largest_planned: micro-batches that all ranks train; None where that of the function cannot be
            chosen.
        max_overhead: the most that the plans of the largest micro-batch may cost more.
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
        over = [n for n, rank in enumerate(self.ranks) if rank.update_peak_bytes > self.memory_bytes]
        if over and self.optimizer is not None:
            return f"does not fit: the optimizer's step of rank {over[0]} needs more, whatever the plans"
        if self.plain_bytes <= self.memory_bytes:
            return "fits without a plan"
        if self.overhead is None:
            worst = max(range(len(self.ranks)), key=lambda n: self.ranks[n].least_bytes)
            return f"does not fit: no plans are known for rank {worst} that need less than its least"
        return f"fits by plans: a step of the schedule takes {100 * self.overhead:+.1f} % time"

    def _largest(self) -> list[str]:
        most = self.largest_planned
        if most is None:
            return []
        planned = f"{most.size} by plans at {100 * most.overhead:+.1f} % time" if most.size else "none by plans"
        return [f"largest micro-batch: {self.largest_plain} plain, {planned}; at most {100 * self.max_overhead:+.0f} %"]

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
        return "\n".join([head, *lines, *end, f"costs: a roofline of {self.target.name}; {self.seconds:.0f} s"])


class PipelineBatches:
    """The stages of a pipeline by micro-batch, which plans of two captured ones go with."""

    def __init__(self, asked: Asked, first: Pipeline, updates: Sequence[Update]) -> None:
        self._asked, self._updates, self._actions = asked, updates, first.actions
        self._plans = first.plans
        known = asked.known_batch
        stages = {number: stage for rank in first.ranks for number, stage in rank.stages.items()}
        self._stages = Family(
            lambda size: captured_stages(asked, self._actions, size, stages),
            stages_between,
            None if known is None else (known, stages),
        )

    def plain(self) -> int:
        """The largest micro-batch that all ranks train without a plan."""
        return largest(lambda size: self._at(self._stages[size]).plain_bytes <= self._asked.memory_bytes)

    def planned(self) -> Batch:
        """The largest one for which plans are found that cost no more than is asked for, captured and planned."""
        return largest_that(self._promised, self._overhead, self._asked.max_overhead)

    def _at(self, stages: Mapping[int, Stage]) -> Pipeline:
        return Pipeline.of(self._actions, stages, self._updates)

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
    start, actions = time.perf_counter(), Actions(asked.parallel)
    stages = captured_stages(asked, actions, asked.batch)
    updates = [Update.of([stages[n] for n in mine], asked.optimizer) for mine in actions.numbers]
    pipeline = Pipeline.of(actions, stages, updates)
    asked.phase("planning all stages at several bounds")
    pipeline.plan()
    asked.phase("planning for the device's memory")
    picked, plain_ns = pipeline.planned(asked), pipeline.plain_ns
    ranks = _ranks(pipeline, None if picked is None else picked[1])
    curve = _curve(pipeline, max(rank.least_bytes for rank in ranks), plain_ns)
    whole = _answer(asked.memory_bytes, picked, plain_ns)
    sizes: tuple[int | None, Batch | None] = None, None
    if asked.batch_is_free:
        asked.phase("looking for the largest micro-batch")
        search = PipelineBatches(asked, pipeline, updates)
        sizes = search.plain(), search.planned()
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
        *sizes,
        asked.max_overhead,
        time.perf_counter() - start,
    )


def _ranks(pipeline: Pipeline, picked: Sequence[tuple[int, ...]] | None) -> tuple[RankFit, ...]:
    """What each rank needs, and by the plans that were picked."""
    found = []
    for number, rank in enumerate(pipeline.ranks):
        planned = None if picked is None else rank.planned_bytes(picked[number])
        sizes = rank.plain_bytes, rank.least_bytes, planned, rank.update_bytes
        found.append(RankFit(tuple(rank.stages), rank.fixed, *sizes))
    return tuple(found)


def _curve(pipeline: Pipeline, low: int, plain_ns: int) -> tuple[Answer, ...]:
    """What the same budget for each rank leads to, from the least one to the plain peak."""
    high = pipeline.plain_bytes
    budgets = sorted({low + (high - low) * i // POINTS for i in range(POINTS + 1)})
    return tuple(_answer(budget, pipeline.chosen(budget), plain_ns) for budget in budgets)


def _answer(budget: int, found: tuple[int, Any] | None, plain_ns: int) -> Answer:
    if found is None:
        return Answer(Status.NOTHING_FOUND, "pipeline", budget)
    return Answer(Status.FEASIBLE, "pipeline", budget, found[0], overhead=overhead_of(found[0], plain_ns))
