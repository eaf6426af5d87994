"""Will it fit? What training a model on a named device needs, without a plan and with one, from fake tensors only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack, overload

from remat_ir import (
    Answer,
    Graph,
    InvalidData,
    Plan,
    Problem,
    Status,
    least_memory,
    plain_peak,
    plain_plan,
    readable,
    verify,
    working_set,
)

from ..planning.options import SolveOptions, with_name
from ..planning.planner import Planner, planner_for
from .batches import Batch, GraphBatches, figures_of
from .build import autocast as casting
from .build import in_dtype
from .devices import Target, target_of
from .pipeline import PipelineFit, curve_budgets, fit_pipeline
from .step import ALONE, Asked, Parallel, Parts, TargetStep, target_step

LEAST, HERE, LARGEST, PLANNED = "least budget", "on this device", "largest batch", "largest batch by a plan"
"""Rows of the table that are a part each, which may fail."""


@dataclass(frozen=True, eq=False)
class Fit:
    """What a training step needs on a device; bytes are requested ones, parameters and optimizer state included.

    Attributes:
        step: what was captured.
        memory_bytes: what a job may fill of the device.
        plain_bytes: the peak of plain training.
        least_bytes: the least peak of any known plan; None: as for `least_bound_bytes`.
        least_bound_bytes: proved: no plan needs less.
        answer: the plan for the device's memory; it has none if none was found.
        overhead_range: what that plan costs more if each class of kernels is off by up to 20 %.
        curve: plans at budgets from the least one to plain training.
        largest_plain, largest_planned: None where the batch of the function cannot be chosen.
        unknown: the parts that failed, by name, and why; all others are as if nothing had.
        max_overhead: the most that the plan of the largest batch may cost more.
        released: the same with gradients released as they are made, where that was asked for.
        parallel: the ranks that the job is spread over; all figures are those of one of them, but `batch` is its own.
    """

    step: TargetStep
    batch: int | None
    optimizer: str | None
    memory_bytes: int
    plain_bytes: int
    least_bytes: int
    least_bound_bytes: int
    answer: Answer
    overhead_range: tuple[float, float] | None
    curve: tuple[Answer, ...]
    largest_plain: int | None
    largest_planned: Batch | None
    max_overhead: float
    seconds: float
    released: Fit | None = None
    parallel: Parallel = ALONE
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What is asked, the figure, and what to know about it."""
        share = f"{100 * self.plain_bytes / self.memory_bytes:.0f} % of the {readable(self.memory_bytes)} for tensors"
        found = [(name, readable(size), "there throughout") for name, size in self.step.step.fixed.items() if size]
        found.append(("plain training needs", readable(self.plain_bytes), share))
        bound = f"a plan is known; none needs less than {readable(self.least_bound_bytes)}"
        found.append((LEAST, readable(self.least_bytes), bound))
        if self.optimizer is not None:
            update = readable(self.step.update_peak_bytes)
            found.append(("the optimizer's step", update, "its temporaries and all gradients, whatever the plan"))
        found.append((HERE, *self._here()))
        if self.largest_plain is not None:
            found.append((f"{LARGEST}, plain", str(self.largest_plain), ""))
        if self.largest_planned is not None:
            most = self.largest_planned
            limit = f"at {100 * most.overhead:+.1f} % time; at most {100 * self.max_overhead:+.0f} % was asked for"
            found.append((PLANNED, str(most.size), limit if most.size else "not even one fits"))
        failed = {name: (name, "not known", why) for name, why in self.unknown.items()}
        return [failed.pop(row[0], row) for row in found] + list(failed.values())

    @property
    def fits(self) -> bool:
        """Whether it trains in the device's memory, by a plan or without one, the optimizer's step included."""
        return self.answer.plan is not None and not self._update_is_over

    @property
    def figures(self) -> dict[str, object]:
        """All of it, as JSON has it."""
        return {
            "model": self.step.name,
            "device": None if self.step.target is None else self.step.target.name,
            "priced": self.step.priced,
            "parallel": self.parallel._asdict(),
            "memory_bytes": self.memory_bytes,
            "fixed_bytes": dict(self.step.step.fixed),
            "plain_bytes": self.plain_bytes,
            "update_peak_bytes": self.step.update_peak_bytes,
            "least_bytes": self.least_bytes,
            "least_bound_bytes": self.least_bound_bytes,
            "overhead": self.answer.overhead,
            "overhead_range": self.overhead_range,
            **figures_of(self.curve, self.largest_plain, self.largest_planned),
            "unknown": dict(self.unknown),
            "seconds": self.seconds,
            "released": None if self.released is None else self.released.figures,
        }

    @property
    def _update_is_over(self) -> bool:
        return self.optimizer is not None and self.step.update_peak_bytes > self.memory_bytes

    def _here(self) -> tuple[str, str]:
        if self._update_is_over:
            return "does not fit", "the optimizer's step needs more, and no plan of activations helps there"
        if self.plain_bytes <= self.memory_bytes:
            return "fits", "without a plan"
        if self.answer.overhead is None:
            least = "and none can" if self.least_bound_bytes > self.memory_bytes else "none was found in the time given"
            return "does not fit", f"no plan fits, {least}"
        low, high = self.overhead_range or (self.answer.overhead,) * 2
        how = f"by a plan; {100 * low:.1f} to {100 * high:.1f} % if each class of kernels is off by up to 20 %"
        return f"{100 * self.answer.overhead:+.1f} % time", how

    def __str__(self) -> str:
        device = "this machine" if self.step.target is None else self.step.target.name
        head = f"{self.step.name} on {device}"
        head += "" if self.batch is None else f", batch {self.batch}"
        head += "" if self.optimizer is None else f", {self.optimizer}"
        head += "" if self.parallel.ranks == 1 else f", one of {self.parallel.ranks} ranks ({self.parallel})"
        rows = list(self.rows)
        if self.released is not None:
            there = {row[:2] for row in rows}
            rows += [("with gradients released as they are made:", "", "")]
            rows += [row for row in self.released.rows if row[2] != "there throughout" or row[:2] not in there]
        wide = [max(len(row[i]) for row in rows if row[1]) for i in range(2)]
        lines = [f"{name:<{wide[0]}}  {value:>{wide[1]}}  {note}".rstrip() for name, value, note in rows]
        return "\n".join([head, *lines, f"costs: {self.step.priced}; {self.seconds:.0f} s", *self._paste()])

    def _paste(self) -> list[str]:
        """The line of Python that trains by a plan, where there is one, and one is needed here or at a larger batch."""
        more = self.largest_planned is not None and self.largest_planned.size > (self.largest_plain or 0)
        needed = more or self.plain_bytes > self.memory_bytes
        if not needed or not self.fits or self.step.target is None:
            return []
        options = "" if self.optimizer is None else ", optimizer=optimizer"
        options += ", release_gradients=True" if self.step.job.releases else ""
        return [f'to train by a plan: remat.enable(model, budget="{self.memory_bytes // 2**20}MiB"{options})']


class _Options(TypedDict, total=False):
    optimizer: str | None
    release_gradients: bool
    batch: int | None
    max_overhead: float
    planner: Planner | str | None
    time_limit_s: float
    name: str | None
    dtype: str | None
    autocast: str | None
    phase: Callable[[str], None]


@overload
def predict(
    make_model: Callable[..., Any], device: str | Target, *, parallel: None = None, **options: Unpack[_Options]
) -> Fit: ...


@overload
def predict(
    make_model: Callable[..., Any], device: str | Target, *, parallel: str | None, **options: Unpack[_Options]
) -> Fit | PipelineFit: ...


def predict(
    make_model: Callable[..., Any],
    device: str | Target,
    *,
    optimizer: str | None = None,
    release_gradients: bool = False,
    parallel: str | None = None,
    batch: int | None = None,
    max_overhead: float = 1 / 3,
    planner: Planner | str | None = None,
    time_limit_s: float = 20.0,
    name: str | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    phase: Callable[[str], None] = lambda _: None,
) -> Fit | PipelineFit:
    """Find out whether a model trains on a device: what it needs plain, by a plan, and the largest batch of each.

    Nothing large is allocated and no device is needed. Prices are a model: see `remat.target.price`.

    Args:
        make_model: returns `(model, args)` or `(model, args, kwargs)`; if it takes `batch`, the largest is looked for.
        device: by its name, such as "h100" (`devices.toml` has them), or the path of a table in a TOML or JSON file.
        optimizer: the name of one of torch's, such as "adamw"; its state counts.
        release_gradients: say also what it is with `release_gradients=True`, which needs an optimizer.
        parallel: ranks that the job is spread over, such as "fsdp=8,tp=2": see `remat.target.step.Parallel`. All
            figures are then those of one rank, the batch too; messages take no time. With "pp=4", "micros=8" and
            "schedule=1F1B" the function is given `stage` and `stages`, and makes that part of the model: its positional
            arguments are what the part before returns, the last part returns the loss; `batch` is a micro-batch's.
        batch: given to the function; None is its own default.
        max_overhead: the most that the plan of the largest batch may cost, as a share of plain training's time.
        planner: as for `remat.optimize`.
        time_limit_s: for each solve.
        name: what the solves are called in the lists of a service, as for `remat.SolveOptions`.
        dtype: of the model and of its inputs that are not whole numbers, such as "bf16"; None: as they are made.
        autocast: the dtype of `torch.autocast` around the step; None: there is none.

    Returns:
        The figures; as text it is a table. Of a pipeline they are those of each rank (`PipelineFit`), by greedy plans
        of each stage and what the planner makes of those picked.

    Raises:
        InvalidData: the device or the optimizer is not known, the function does not give a model, or its gradients
            cannot be released.
        CaptureError: the step cannot be captured as one graph.

    Example:
        >>> import torch
        >>> def make_model(batch=4):
        ...     return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), torch.ones(batch, 64)
        >>> found = predict(make_model, "l40s", optimizer="adamw", planner="greedy")
        >>> found.plain_bytes <= found.memory_bytes, found.largest_plain > 10_000
        (True, True)
    """
    if not max_overhead >= 0:
        raise InvalidData(f"max_overhead must be at least 0, not {max_overhead}")
    options = SolveOptions(time_limit_s=time_limit_s, max_gap=0.005, name=name)
    optimizer = None if optimizer is not None and optimizer.lower() == "none" else optimizer
    given = target_of(device), Parallel.of(parallel), optimizer, batch, max_overhead, planner_for(planner), options
    asked = Asked(in_dtype(make_model, dtype), *given, phase)
    with casting(autocast):
        return _fits(asked, release_gradients)


def _fits(asked: Asked, release: bool) -> Fit | PipelineFit:
    """The figures of a step, or of a pipeline's."""
    if release:
        asked.parallel.check_released()
        if asked.optimizer is None:
            raise InvalidData("release_gradients=True needs optimizer=, the name of one of torch's")
    if asked.parallel.pp > 1:
        return fit_pipeline(asked)
    parts = Parts()
    found = _fit(asked, False, parts)
    if not release:
        return found
    asked.phase("the same with gradients released")
    released = parts.part("gradients released", lambda: _fit(asked, True, parts), None)
    seconds = found.seconds + (0.0 if released is None else released.seconds)
    return replace(found, released=released, seconds=seconds, unknown={**found.unknown, **parts.unknown()})


def _fit(asked: Asked, release: bool, parts: Parts) -> Fit:
    """The figures, with gradients released or not; once the step is captured, each part by itself."""
    last: TargetStep | None = None

    def at(size: int | None) -> TargetStep:
        nonlocal last  # the first may have a batch of one, whose kernels are others
        last = target_step(
            asked.make_model,
            asked.target,
            batch=size,
            optimizer=asked.optimizer,
            release_gradients=release,
            parallel=str(asked.parallel),
            table=asked.planner.profiles,
            like=last,
            phase=asked.phase,
        )
        return last

    start, time_limit_s = time.perf_counter(), asked.options.time_limit_s
    first, memory = at(asked.batch), asked.memory_bytes
    graph, options = first.graph, with_name(asked.options, first.call_name)
    plain = plain_peak(graph)
    known = f"plain training needs {readable(plain)} of {readable(memory)}"
    asked.phase(f"looking for the least budget; {known}")
    least = parts.part(LEAST, lambda: _least(graph, time_limit_s), plain)
    known += f", a plan {readable(least)}"
    asked.phase(f"planning for the device's memory; {known}")
    here = Problem(graph, memory)
    if plain <= memory:
        answer = Answer.of_plan(here, plain_plan(graph), method="plain")
    else:
        nothing = Answer(Status.NOTHING_FOUND, options.method, memory)
        answer = parts.part(HERE, lambda: asked.planner.plan(here, options), nothing)
    ends = first.overhead_range(answer.plan) if isinstance(answer.plan, Plan) else None
    known += "" if answer.overhead is None else f"; in the device's memory {100 * answer.overhead:+.1f} % time"
    asked.phase(f"planning at several budgets; {known}")
    short = replace(options, time_limit_s=time_limit_s / 4)
    problems = [Problem(graph, budget) for budget in curve_budgets(least, plain)]
    curve = parts.part("other budgets", lambda: tuple(asked.planner.plan(each, short) for each in problems), ())
    largest_plain: int | None = None
    largest_planned: Batch | None = None
    if asked.batch_is_free:
        asked.phase(f"looking for the largest batch; {known}")
        search = GraphBatches(
            lambda size: at(size).graph,
            None if asked.known_batch is None else (asked.known_batch, graph),
            memory,
            asked.max_overhead,
            lambda problem: asked.planner.plan(problem, options),
            asked.phase,
        )
        largest_plain = parts.part(LARGEST, search.plain, None)
        if largest_plain is not None:
            largest_planned = parts.part(PLANNED, search.planned, None)
    return Fit(
        first,
        asked.batch,
        asked.optimizer,
        memory,
        plain,
        least,
        working_set(graph).least_bytes,
        answer,
        ends,
        curve,
        largest_plain,
        largest_planned,
        asked.max_overhead,
        time.perf_counter() - start,
        parallel=asked.parallel,
        unknown=parts.unknown(),
    )


def _least(graph: Graph, seconds: float) -> int:
    """The least peak of a plan that is found in the time given."""
    end = time.perf_counter() + seconds
    plan = least_memory(graph, stop=lambda: time.perf_counter() > end, rounds=8)
    return verify(Problem(graph, plain_peak(graph)), plan).peak_bytes
