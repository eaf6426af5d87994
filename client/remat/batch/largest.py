"""`remat.max_batch`: the largest batch that trains inside a budget at bounded overhead, found by trying.

What the fit of two sizes promises counts for nothing until the step has been captured at that batch, planned there, and
run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import nn

from remat_ir import Answer, InvalidData, readable

from ..capture.operations import check_functional
from ..distributed import planner_of
from ..errors import NothingFound
from ..planning.budget import Budget, Fraction, read_budget
from ..planning.options import SolveOptions, StepFields, solve_options, with_name
from ..planning.planner import Planner, plan_or_raise
from ..training.job import Job
from .search import BatchSearch, Try

log = logging.getLogger("remat")

EACH = SolveOptions(time_limit_s=30.0, max_gap=0.01)
"""The defaults here: each of several batches is solved."""


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
        BudgetTooSmall, NothingFound: not even the smallest batch trains; the message says why.
        InvalidData: arguments that cannot be meant, such as a budget that is a share of what the batch needs.
    """
    asking = solve_options(max_batch, StepFields, options, fields, default=EACH)
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
        raise _nothing(search, tries[-1])
    return _largest(search, tries, *best)


def _check(
    budget: Budget, max_overhead: float | None, multiple_of: int, limit: int, precision: float, most_tries: int
) -> None:
    if isinstance(read_budget(budget), Fraction):
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


def _largest(search: BatchSearch, tries: list[Try], found: Try, answer: Answer) -> LargestBatch:
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


def _nothing(search: BatchSearch, tried: Try) -> Exception:
    message = f"no batch trains within the budget: at a batch of {tried.batch}, {tried.why}"
    if search.last is not None and search.last.plan is None:
        try:
            plan_or_raise(search.last)
        except NothingFound as error:
            return type(error)(message, search.last)
        except Exception as error:  # noqa: BLE001 – whatever it raises is what the caller raises
            return error
    return torch.OutOfMemoryError(message) if search.last is None else NothingFound(message, search.last)
