"""`remat.max_batch`: the largest batch that trains inside a budget at bounded overhead, found by trying.

Sizes and workspaces of a training step are nearly affine in the batch, so the graphs of two small batches give the
graph of any other; a plan of one batch is replayed on the graph of the next (Checkmate, equation 10, with real sizes).
What this promises counts for nothing until the step has been captured at that batch, planned there, and run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import nn

from remat_ir import (
    Answer,
    Graph,
    InvalidData,
    InvalidPlan,
    Plan,
    Problem,
    Status,
    one_forward_pass_more,
    overhead_of,
    readable,
    verify,
)

from ..capture.operations import check_functional
from ..device import Accelerator, of
from ..device_flags import out_of_memory
from ..distributed import planner_of
from ..errors import CaptureError, NothingFound
from ..planning.budget import Budget, Fraction, budget_bytes, read_budget
from ..planning.greedy import greedy_answer, same_structure
from ..planning.options import SolveOptions, StepFields, solve_options, with_name
from ..planning.planner import CoordinatedPlanner, Planner, plan_or_raise
from ..profiling.measure import forward_backward, peak_memory
from ..profiling.room import rehearsed
from ..profiling.timing import affine
from ..training.enable import following
from ..training.job import Job
from ..training.memory import StepRoom
from ..training.optimize import carry_out
from ..training.step import Planned, TrainingStep, training_step

log = logging.getLogger("remat")

EACH = SolveOptions(time_limit_s=30.0, max_gap=0.01)
"""The defaults here: each of several batches is solved."""


def between(one: tuple[int, Graph], other: tuple[int, Graph], size: int) -> Graph:
    """The graph at a size (batch, sequence length), from two sizes and graphs of one structure, each number affine.

    Bytes and costs are rounded up. A number that shrinks with the size is taken as the larger of the two. One that
    grows faster than the size is taken as proportional below the larger size, which is never too little there; above
    it a cost is, too, since the difference of two small measurements is mostly noise.

    Raises:
        ValueError: the same size twice, or graphs of two structures.
    """
    (low, small), (high, large) = sorted((one, other), key=lambda pair: pair[0])
    if low == high or not same_structure(small, large):
        raise ValueError(f"sizes {low} and {high} do not span a family of graphs")

    def fitted(a: Sequence[int], b: Sequence[int], measured: bool = False) -> tuple[int, ...]:
        proportional = measured or size < high
        return tuple(affine(x, y, low, high, size, proportional) for x, y in zip(a, b, strict=True))

    return replace(
        large,
        op_cost_ns=fitted(small.op_cost_ns, large.op_cost_ns, measured=True),
        op_workspace_bytes=fitted(small.op_workspace_bytes, large.op_workspace_bytes),
        value_bytes=fitted(small.value_bytes, large.value_bytes),
        fixed_bytes=affine(small.fixed_bytes, large.fixed_bytes, low, high, size, size < high),
    )


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


def most_overhead(asked: float | None, graph: Graph) -> float:
    """The most that a plan may cost more, as a share: as asked, or one more forward pass (Checkmate, equation 9).

    Example:
        >>> from remat_ir import graph_of
        >>> most_overhead(None, graph_of([3, 5, 2], [1, 1, 1], [[], [0], [1]], backward_from=2))
        0.8
    """
    return overhead_of(one_forward_pass_more(graph), graph.total_cost_ns) if asked is None else asked


def within(problem: Problem, plan: Plan, most: float) -> bool:
    """Whether a plan fits, and costs no more than plain training by more than a share of its time."""
    try:
        cost = verify(problem, plan).cost_ns
    except InvalidPlan:
        return False
    return overhead_of(cost, problem.subject.total_cost_ns) <= most


def quick_look(problem: Problem) -> Answer:
    """The greedy plan of one of many batches, by a short look."""
    return greedy_answer(problem, time_limit_s=2.0, look_s=0.0)


@dataclass(eq=False, repr=False)
class BatchSearch:
    """What is known of a module's step by batch: graphs captured, plans found, and what a real step needed beyond.

    Attributes:
        asking: how each plan is asked for.
        job: what is there next to each step.
        unit: only its multiples are tried.
        steps: what was captured, by batch.
        unseen: bytes a sample that a real step needed beyond the prediction: a loss outside of the module, for one.
        kept: bytes that libraries allocate for good, whatever the batch: a workspace in each thread that uses them.
        allowed: what others and the allocator's segments left of a budget for tensors, at the batch planned last.
        full: whether the device ran out of memory at some batch.
        solves: how many times the planner was asked.
        last: its last answer about a real step.
    """

    model: nn.Module
    make_batch: Callable[[int], Any]
    budget: Budget
    max_overhead: float | None
    planner: CoordinatedPlanner
    asking: SolveOptions
    job: Job
    loss: Callable[[Any], torch.Tensor] | None
    unit: int
    precision: float
    steps: dict[int, TrainingStep] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    unseen: float = 0.0
    kept: int = 0
    allowed: int | None = None
    full: bool = False
    solves: int = 0
    last: Answer | None = None

    def __post_init__(self) -> None:
        self.device = of(next((p.device for p in self.model.parameters()), torch.device("cpu")))

    def profile_two(self) -> None:
        """Two sizes, neither of which is 1: a batch of one has strides of its own."""
        first = self.unit if self.unit > 1 else 2
        for batch in (first, 2 * first):
            step = self._step(batch, *self._arguments(batch))
        room = self._room(step)
        if room is not None:
            self.allowed = room.planned(self._problem(step.graph, batch)).budget_bytes

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

    def train(self, batch: int) -> tuple[Try, Answer | None]:
        """Capture, plan and run a real step at a batch; no answer where its kernels do not fit by themselves."""
        start = time.perf_counter()

        def ended(
            why: str, answer: Answer | None, predicted: int | None = None, measured: int | None = None
        ) -> tuple[Try, Answer | None]:
            seconds = time.perf_counter() - start
            overhead = None if answer is None else answer.overhead
            return Try(batch, whole, not why, overhead, predicted, measured, why, seconds), answer

        args, kwargs = self._arguments(batch)  # held throughout: they are part of what is there
        try:
            step = self._step(batch, args, kwargs)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.full = True
            whole = budget_bytes(self.budget, self._fitted(batch), self.asking.slack)
            return ended(f"the device ran out of memory while kernels were measured: {error}", None)
        whole = budget_bytes(self.budget, step.graph, self.asking.slack)
        room = self._room(step)
        problem, answer = self._planned(step, batch, room)
        self.last = answer
        if answer.plan is None:
            return ended(answer.message or f"the solve ended {answer.status.value}", answer)
        planned = carry_out(step, problem, answer, room)
        predicted = planned.predicted_bytes
        if room is not None and planned.memory is not None:
            predicted = room.outside + planned.memory.reserved
        assert isinstance(answer.plan, Plan)
        self.plans.append(answer.plan)
        if answer.overhead is not None and answer.overhead > most_overhead(self.max_overhead, step.graph):
            return ended(
                f"the best plan costs {100 * answer.overhead:.1f} % more than plain training", answer, predicted
            )
        found = self._measure(planned, room, args, kwargs)
        beyond = 0 if found is None else found - (self.kept if room is None else 0) - predicted
        told = [self.kept, found or 0, beyond, int(found is None)]
        self.kept, measured, beyond, full = self.planner.coordinator.most(told)  # ranks then go on alike
        if full:
            self.full = True
            return ended("the device ran out of memory", answer, predicted)
        self.unseen = max(self.unseen, beyond / batch)
        if measured > whole:
            over = f"the measured peak of {readable(measured)} is over the budget of {readable(whole)}"
            return ended(over, answer, predicted, measured)
        return ended("", answer, predicted, measured)

    def _room(self, step: TrainingStep) -> StepRoom | None:
        """The room of a step where the budget is what a driver has to give; else None."""
        if not isinstance(self.budget, int) or not isinstance(self.device, Accelerator):
            return None
        return StepRoom(step, self.budget, self.asking.slack, self.job, 0, self.planner.coordinator)

    def _planned(self, step: TrainingStep, batch: int, room: StepRoom | None) -> tuple[Problem, Answer]:
        """A real step's problem and the answer to it."""
        if room is None:
            problem = self._problem(step.graph, batch)
            return problem, self._ask(problem)
        self.allowed = room.planned(self._problem(step.graph, batch)).budget_bytes
        problem, answer = room.settled(
            self._problem(step.graph, batch),
            self._ask,
            lambda _, answer: room.over(lambda: room.reserved(answer.plan)),
        )
        self.allowed = problem.budget_bytes + self._unseen_bytes(batch)
        return problem, answer

    def _measure(
        self, planned: Planned, room: StepRoom | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> int | None:
        """The peak of a second step with what the first one left for good; None: out of memory.

        Where the budget is what a driver has to give, it is that of some steps.
        """
        module, asking = self.model, replace(self.asking, self_check=False, on_failure="raise")  # watched here
        module.zero_grad(set_to_none=True)
        run = forward_backward(following(module, planned, self.planner, asking), args, kwargs, self.loss)
        try:
            if room is not None and room.device is not None:
                return room.outside + rehearsed(room.device, run, self.job.blocks(), module.zero_grad)
            before = self.device.requested_bytes()
            run()
            module.zero_grad(set_to_none=True)
            self.kept += max(0, self.device.requested_bytes() - before)
            peak = peak_memory(run, self.device.device).peak_bytes
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return None
        finally:
            module.zero_grad(set_to_none=True)
        return planned.step.graph.fixed_bytes + self.kept + peak

    def _promised(self, units: int) -> bool:
        """Whether the fitted graph has a plan inside budget and overhead: an old one, a greedy one, or a solved one."""
        batch = units * self.unit
        graph = self._fitted(batch)
        problem, most = self._problem(graph, batch), most_overhead(self.max_overhead, graph)
        if any(within(problem, plan, most) for plan in reversed(self.plans)):
            return True
        for ask in (self._look, self._ask):
            answer = ask(problem)
            if isinstance(answer.plan, Plan) and within(problem, answer.plan, most):
                self.plans.append(answer.plan)
                return True
            if answer.bound_ns and overhead_of(answer.bound_ns, graph.total_cost_ns) > most:
                return False
        return False

    def _look(self, problem: Problem) -> Answer:
        """As `quick_look`, which is cut short by the clock: by that of the first rank."""
        return self.planner.coordinator.answer(problem, lambda: quick_look(problem))

    def _ask(self, problem: Problem) -> Answer:
        self.solves += 1
        return self.planner.plan(problem, self.asking)

    def _problem(self, graph: Graph, batch: int) -> Problem:
        whole = self.allowed
        if whole is None:
            whole = budget_bytes(self.budget, graph, self.asking.slack) - self.kept
        return Problem(graph, max(0, whole - self._unseen_bytes(batch)))

    def _unseen_bytes(self, batch: int) -> int:
        return int(max(0.0, self.unseen) * batch)

    def _fitted(self, batch: int) -> Graph:
        """The graph at a batch, by the two nearest that were captured."""
        if batch in self.steps:
            return self.steps[batch].graph
        lower = [b for b in self.steps if b < batch]
        upper = [b for b in self.steps if b > batch]
        one, other = (max(lower), min(upper)) if lower and upper else (min(self.steps), max(self.steps))
        return between((one, self.steps[one].graph), (other, self.steps[other].graph), batch)

    def _step(self, batch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingStep:
        if batch not in self.steps:
            like = next(iter(self.steps.values()), None)
            extra = {"optimizer state": self.job.update().throughout_bytes}
            before = self.device.requested_bytes()
            step = training_step(
                self.model,
                args,
                kwargs,
                table=self.planner.profiles,
                extra=extra,
                like=like,
                functional=self.asking.functional_ops,
                collectives_again=self.asking.recompute_collectives,
            )
            (left,) = self.planner.coordinator.most([self.device.requested_bytes() - before])
            self.kept += max(0, left)
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
    max_overhead: float | None = None,
    *,
    planner: Planner | str | None = None,
    make_optimizer: Callable[[nn.Module], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    multiple_of: int = 1,
    precision: float = 0.01,
    limit: int = 65536,
    most_tries: int = 6,
    on_try: Callable[[Try], None] | None = None,
    options: SolveOptions | None = None,
    **fields: Unpack[StepFields],
) -> LargestBatch:
    """The largest batch that trains inside a budget at bounded overhead, verified by a real step.

    Args:
        make_model: the module, in train mode, on its device; called once.
        make_batch: from a batch size to the model's arguments: a tensor, a tuple, or a mapping of keyword arguments.
        budget: bytes of the device, on an accelerator those that its driver has to give, or `remat.ActivationBytes`.
        max_overhead: the most predicted time beyond plain training, as a share of it; 0 is plain training, None is one
            more forward pass (Checkmate, equation 9).
        planner: as for `remat.optimize`.
        make_optimizer: from the module to its optimizer, whose state counts as fixed.
        loss: from the model's output to the scalar that is differentiated; by default the output, its `loss` or its
            first entry.
        multiple_of: only such batches count.
        precision: the share of the batch by which the result may fall short of the largest; below 1 / precision batches
            it is the largest by the fit.
        limit: the largest batch of interest.
        most_tries: the most batches that are captured and trained for real.
        on_try: called after each of them.
        options, fields: those of `remat.SolveOptions` that concern a step and its plan, for each solve; without an
            object, 30 seconds and a gap of 0.01 for each.

    Raises:
        CaptureError: the training step cannot be captured, or is another program at another batch.
        BudgetTooSmall, NothingFound: not even the smallest batch trains, or none of `most_tries`; the message says why.
        InvalidData: arguments that cannot be meant, such as a budget that is a share of what the batch needs.
    """
    asking = solve_options(max_batch, StepFields, options, fields, default=EACH)
    budget = read_budget(budget)
    _check(budget, max_overhead, multiple_of, limit, precision, most_tries)
    check_functional(asking.functional_ops)
    if asking.link is not None:
        raise InvalidData("max_batch looks for plans that move nothing to the host: leave link= out")
    asked = planner_of(planner, asking)
    model = _made(make_model)
    asking = with_name(asking, type(model).__name__)
    job = Job(None if make_optimizer is None else make_optimizer(model))
    search = BatchSearch(model, make_batch, budget, max_overhead, asked, asking, job, loss, multiple_of, precision)
    search.profile_two()
    tries, best = _tried(search, limit // multiple_of + 1, most_tries, on_try)
    if best is None:
        raise _nothing(search, tries)
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


def _check(
    budget: Budget, max_overhead: float | None, multiple_of: int, limit: int, precision: float, most_tries: int
) -> None:
    if isinstance(budget, Fraction):
        raise InvalidData("a share of what a batch needs grows with the batch: give bytes or remat.ActivationBytes")
    if max_overhead is not None and not max_overhead >= 0:
        raise InvalidData(f"max_overhead must be at least 0, not {max_overhead}")
    if not 1 <= multiple_of <= limit:
        raise InvalidData(f"multiple_of must be from 1 to the limit of {limit}, not {multiple_of}")
    if not 0 <= precision < 1:
        raise InvalidData(f"precision must be at least 0 and below 1, not {precision}")
    if most_tries < 1:
        raise InvalidData(f"most_tries must be at least 1, not {most_tries}")


def _made(make_model: Callable[[], nn.Module]) -> nn.Module:
    if not callable(make_model) or isinstance(make_model, nn.Module):
        said = type(make_model).__name__
        raise InvalidData(f"make_model must be a function that returns the model, not a {said}: write lambda: model")
    return make_model()


def _tried(
    search: BatchSearch, ceiling: int, most_tries: int, on_try: Callable[[Try], None] | None
) -> tuple[list[Try], tuple[Try, Answer] | None]:
    """The batches that were trained, and the largest that fits with its answer; `ceiling` units are too many."""
    unit = search.unit
    tries: list[Try] = []
    best: tuple[Try, Answer] | None = None
    while len(tries) < most_tries:
        floor = best[0].batch // unit if best else 0
        candidate = search.largest(floor, ceiling)
        if candidate == floor and floor:
            break
        if search.full:  # the device ends before the budget, and no graph says where
            candidate = min(candidate, (floor + ceiling) // 2)
        found, answer = search.train(max(1, candidate) * unit)
        tries.append(found)
        log.info("batch %d: %s", found.batch, found.why or "trains inside the budget")
        if on_try is not None:
            on_try(found)
        if found.fits:
            assert answer is not None
            best = found, answer
        else:
            ceiling = max(1, candidate)
            if ceiling == 1:
                break
    return tries, best


def _nothing(search: BatchSearch, tries: Sequence[Try]) -> Exception:
    """Why no batch was seen to train; that no plan fits the smallest one is raised."""
    tried = tries[-1]
    message = "no batch trains within the budget"
    if tried.batch > search.unit:
        message = f"none of the {len(tries)} batches that were tried trains within the budget; give a larger most_tries"
    message += f": at a batch of {tried.batch}, {tried.why}"
    if search.last is None:
        return torch.OutOfMemoryError(message)
    if search.last.status is Status.INFEASIBLE and tried.batch == search.unit:
        plan_or_raise(search.last)
    return NothingFound(message, search.last)
