"""The largest batch that trains inside a budget at bounded overhead: two sizes profiled, the rest fitted, then tried.

Sizes and workspaces of a training step are nearly affine in the batch, so the graphs of two small batches give the
graph of any other; a plan of one batch is replayed on the graph of the next (Checkmate, equation 10, with real sizes).
What the fit promises counts for nothing until the step has been captured at that batch, planned there, and run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat_ir import Answer, Graph, InvalidData, InvalidPlan, Plan, Problem, overhead_of, verify

from ..errors import CaptureError, NothingFound
from ..planning.budget import Budget, Fraction, budget_bytes, readable
from ..planning.greedy import greedy_answer
from ..planning.planner import Planner, plan_or_raise, planner_for, profile_table
from ..profiling.measure import peak_memory
from ..profiling.measure import training_step as step_of
from ..profiling.optimizers import optimizer_state
from .affine import between
from .execute import Planned, Rematerialized
from .optimize import carry_out
from .sizes import same_structure
from .step import TrainingStep, training_step

log = logging.getLogger("remat")


@dataclass(frozen=True)
class Try:
    """A batch that was captured, planned and trained for real.

    Attributes:
        budget_bytes: fixed bytes included; with `remat.ActivationBytes` it grows with the input.
        fits: inside the budget, as predicted and as measured, and within the overhead.
        overhead: of the plan, predicted; None where there is no plan.
        predicted_bytes, measured_bytes: the peak, fixed bytes included; None where nothing was predicted or run.
        why: why it does not fit; empty if it does.
        seconds: what it took.
    """

    batch: int
    budget_bytes: int
    fits: bool
    overhead: float | None
    predicted_bytes: int | None
    measured_bytes: int | None
    why: str
    seconds: float


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that was seen to train inside the budget.

    Attributes:
        answer: the plan at that batch, verified on the step captured there.
        tries: every batch that was trained, in order.
        profiled: every batch whose kernels were profiled.
        solves: how many times the planner was asked.
    """

    batch: int
    budget_bytes: int
    overhead: float
    predicted_bytes: int
    measured_bytes: int
    answer: Answer = field(repr=False)
    tries: tuple[Try, ...] = field(repr=False)
    profiled: tuple[int, ...] = ()
    solves: int = 0

    def __str__(self) -> str:
        return (
            f"a batch of {self.batch} trains within {readable(self.budget_bytes)}: overhead "
            f"{100 * self.overhead:.1f} %, peak {readable(self.predicted_bytes)} predicted, "
            f"{readable(self.measured_bytes)} measured"
        )


def max_batch(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    budget: Budget,
    max_overhead: float = 0.35,
    *,
    planner: Planner | str | None = None,
    method: str = "auto",
    time_limit_s: float = 30.0,
    max_gap: float = 0.01,
    make_optimizer: Callable[[nn.Module], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    multiple_of: int = 1,
    precision: float = 0.01,
    limit: int = 65536,
    most_tries: int = 6,
    slack: float = 1.0,
    on_try: Callable[[Try], None] | None = None,
) -> LargestBatch:
    """The largest batch that trains inside a budget at bounded overhead, verified by a real step.

    Args:
        make_model: the module, in train mode, on its device; called once.
        make_batch: from a batch size to the model's arguments: a tensor, a tuple, or a mapping of keyword arguments.
        budget: bytes of the device or `remat.ActivationBytes`.
        max_overhead: the most predicted time beyond plain training, as a share of it; 0 is plain training.
        planner, method, time_limit_s, max_gap, slack: as for `remat.optimize`; the limit is for each solve.
        make_optimizer: from the module to its optimizer, whose state counts as fixed.
        loss: from the model's output to the scalar that is differentiated; by default the output, its `loss` or its
            first entry.
        multiple_of: only such batches count.
        precision: the share of the batch by which the result may fall short of the largest; below 1 / precision batches
            it is the largest by the fit.
        limit: the largest batch of interest.
        most_tries: the most batches that are captured and trained for real.
        on_try: called after each of them.

    Raises:
        CaptureError: the training step cannot be captured, or is another program at another batch.
        BudgetTooSmall, NothingFound: not even the smallest batch trains; the message says why.
        InvalidData: arguments that cannot be meant, such as a budget that is a share of what the batch needs.
    """
    if isinstance(budget, Fraction):
        raise InvalidData("a share of what a batch needs grows with the batch: give bytes or remat.ActivationBytes")
    if not max_overhead >= 0:
        raise InvalidData(f"max_overhead must be at least 0, not {max_overhead}")
    if not 1 <= multiple_of <= limit:
        raise InvalidData(f"multiple_of must be from 1 to the limit of {limit}, not {multiple_of}")
    if not 0 <= precision < 1:
        raise InvalidData(f"precision must be at least 0 and below 1, not {precision}")
    if most_tries < 1:
        raise InvalidData(f"most_tries must be at least 1, not {most_tries}")
    asking = {"method": method, "time_limit_s": time_limit_s, "max_gap": max_gap}
    model = make_model()
    search = _Search(model, make_batch, budget, max_overhead, planner_for(planner), asking, slack, multiple_of)
    search.extra = optimizer_state(make_optimizer(model)) if make_optimizer is not None else 0
    search.loss, search.precision = loss, precision
    search.profile_two()
    tries: list[Try] = []
    best: tuple[Try, Answer] | None = None
    ceiling = limit // multiple_of + 1
    while len(tries) < most_tries:
        floor = best[0].batch // multiple_of if best else 0
        candidate = search.largest(floor, ceiling)
        if candidate == floor and floor:
            break
        found, answer = search.train(max(1, candidate) * multiple_of)
        tries.append(found)
        log.info("batch %d: %s", found.batch, found.why or "trains inside the budget")
        if on_try is not None:
            on_try(found)
        if found.fits:
            best = found, answer
        else:
            ceiling = max(1, candidate)
            if ceiling == 1:
                break
    if best is None:
        raise _nothing(search, tries[-1])
    found, answer = best
    assert found.overhead is not None
    assert found.predicted_bytes is not None
    assert found.measured_bytes is not None
    return LargestBatch(
        found.batch,
        found.budget_bytes,
        found.overhead,
        found.predicted_bytes,
        found.measured_bytes,
        answer,
        tuple(tries),
        tuple(sorted(search.steps)),
        search.solves,
    )


class _Search:
    def __init__(
        self,
        model: nn.Module,
        make_batch: Callable[[int], Any],
        budget: Budget,
        max_overhead: float,
        planner: Planner,
        asking: Mapping[str, Any],
        slack: float,
        multiple_of: int,
    ) -> None:
        self.model, self.make_batch, self.budget, self.max_overhead = model, make_batch, budget, max_overhead
        self.planner, self.asking, self.slack, self.unit = planner, asking, slack, multiple_of
        self.table = profile_table(planner)
        self.extra = 0
        self.loss: Callable[[Any], torch.Tensor] | None = None
        self.precision = 0.0
        self.steps: dict[int, TrainingStep] = {}
        self.plans: list[Plan] = []
        self.unseen = 0.0
        """Bytes a sample that a real step needed beyond the prediction: a loss outside of the module, for one."""
        self.solves = 0
        self.last: Answer | None = None

    def profile_two(self) -> None:
        """Two sizes, neither of which is 1: a batch of one has strides of its own."""
        first = self.unit if self.unit > 1 else 2
        self._step(first)
        self._step(2 * first)

    def largest(self, floor: int, ceiling: int) -> int:
        """The largest number of units in [floor, ceiling) that the fitted graphs promise; `floor` needs no proof."""
        low, stride = floor, max(1, floor // 8)
        while low + max(1, int(low * self.precision)) < ceiling:
            # a gallop, then a bisection; a plan that is there is replayed for nothing, so it is carried on first
            here = min(low + stride, ceiling - 1)
            if self._promised(here):
                low, stride = here, 2 * stride
            elif here == low + 1:
                break
            else:
                ceiling, stride = here, max(1, (here - low) // 2)
        return low

    def train(self, batch: int) -> tuple[Try, Answer]:
        """Capture, plan and run a real step at a batch."""
        start = time.perf_counter()

        def ended(
            why: str, answer: Answer, predicted: int | None = None, measured: int | None = None
        ) -> tuple[Try, Answer]:
            seconds = time.perf_counter() - start
            return Try(batch, whole, not why, answer.overhead, predicted, measured, why, seconds), answer

        step = self._step(batch)
        whole = budget_bytes(self.budget, step.graph, self.slack)
        problem = self._problem(step.graph, batch)
        answer = self._ask(problem)
        self.last = answer
        if answer.plan is None:
            return ended(answer.message or f"the solve ended {answer.status.value}", answer)
        planned = carry_out(step, problem, answer)
        assert isinstance(answer.plan, Plan)
        self.plans.append(answer.plan)
        if answer.overhead is not None and answer.overhead > self.max_overhead:
            return ended(
                f"the best plan costs {100 * answer.overhead:.1f} % more than plain training",
                answer,
                planned.predicted_bytes,
            )
        measured = self._measure(planned, batch)
        if measured is None:
            return ended("the device ran out of memory", answer, planned.predicted_bytes)
        self.unseen = max(self.unseen, (measured - planned.predicted_bytes) / batch)
        if measured > whole:
            over = f"the measured peak of {readable(measured)} is over the budget of {readable(whole)}"
            return ended(over, answer, planned.predicted_bytes, measured)
        return ended("", answer, planned.predicted_bytes, measured)

    def _measure(self, planned: Planned, batch: int) -> int | None:
        args, kwargs = self._arguments(batch)
        module = Rematerialized(self.model, lambda *_: planned)
        module.zero_grad(set_to_none=True)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        try:
            peak = peak_memory(step_of(module, args, kwargs, self.loss), device).peak_bytes
        except torch.OutOfMemoryError:
            return None
        finally:
            module.zero_grad(set_to_none=True)
        return planned.step.graph.fixed_bytes + peak

    def _promised(self, units: int) -> bool:
        """Whether the fitted graph has a plan inside budget and overhead: an old one, a greedy one, or a solved one."""
        batch = units * self.unit
        graph = self._fitted(batch)
        problem = self._problem(graph, batch)
        if any(self._cheap(problem, plan) for plan in reversed(self.plans)):
            return True
        for ask in (self._greedy, self._ask):
            answer = ask(problem)
            if isinstance(answer.plan, Plan) and self._cheap(problem, answer.plan):
                self.plans.append(answer.plan)
                return True
            if answer.bound_ns and overhead_of(answer.bound_ns, graph.total_cost_ns) > self.max_overhead:
                return False
        return False

    def _cheap(self, problem: Problem, plan: Plan) -> bool:
        try:
            cost = verify(problem, plan).cost_ns
        except InvalidPlan:
            return False
        return overhead_of(cost, problem.subject.total_cost_ns) <= self.max_overhead

    def _greedy(self, problem: Problem) -> Answer:
        return greedy_answer(problem, time_limit_s=2.0, look_s=0.0)

    def _ask(self, problem: Problem) -> Answer:
        self.solves += 1
        return self.planner.plan(problem, **self.asking)

    def _problem(self, graph: Graph, batch: int) -> Problem:
        whole = budget_bytes(self.budget, graph, self.slack)
        return Problem(graph, max(0, whole - int(max(0.0, self.unseen) * batch)))

    def _fitted(self, batch: int) -> Graph:
        """The graph at a batch, by the two nearest that were captured."""
        if batch in self.steps:
            return self.steps[batch].graph
        lower = [b for b in self.steps if b < batch]
        upper = [b for b in self.steps if b > batch]
        if lower and upper:
            one, other = max(lower), min(upper)
        elif lower:
            other = max(lower)
            one = min(lower)
        else:
            one, other = min(upper), max(upper)
        return between((one, self.steps[one].graph), (other, self.steps[other].graph), batch)

    def _step(self, batch: int) -> TrainingStep:
        if batch not in self.steps:
            like = next(iter(self.steps.values()), None)
            args, kwargs = self._arguments(batch)
            step = training_step(self.model, args, kwargs, table=self.table, extra_fixed_bytes=self.extra, like=like)
            if like is not None and not same_structure(like.graph, step.graph):
                if batch != self.unit:
                    raise CaptureError(
                        f"{type(self.model).__name__} is another program at a batch of {batch} than at one of "
                        f"{next(iter(self.steps))}: give multiple_of, or optimize each batch by itself"
                    )
                return step  # a batch of one may have a program of its own; nothing is fitted through it
            self.steps[batch] = step
        return self.steps[batch]

    def _arguments(self, batch: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        made = self.make_batch(batch)
        if isinstance(made, Mapping):
            return (), made
        return (tuple(made), {}) if isinstance(made, Sequence) else ((made,), {})


def _nothing(search: _Search, tried: Try) -> Exception:
    message = f"no batch trains within the budget: at a batch of {tried.batch}, {tried.why}"
    if search.last is not None and search.last.plan is None:
        try:
            plan_or_raise(search.last)
        except NothingFound as error:
            return type(error)(message, search.last)
        except Exception as error:
            return error
    assert search.last is not None
    return NothingFound(message, search.last)
