"""One kind of training step with its plan: what was captured, what was answered, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from remat_ir import Answer

from ..capture.operations import returned_gradients
from ..lowering.allocator import Bytes
from ..planning.quick import Better
from .job import VIEWED, Job
from .step import TrainingStep


@dataclass(frozen=True, eq=False)
class Planned:
    """One kind of training step that has its plan.

    Attributes:
        step: what was captured and profiled.
        answer: the planner's answer, verified on `step.graph`.
        run: the step by the plan: see `StepFunction`.
        predicted_bytes: the peak of the running step as lowered, fixed bytes included; at most the plan's peak.
        memory: the peaks of training by the plan on its accelerator, with all that this process has there, as a model
            of the allocator predicts them; None on the CPU, and for a unit of a model.
        better: the plan that is still being looked for, where training started on a quick one.
        job: what is there next to the step, and steps the parameters.

    Example:
        >>> import remat, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
        >>> planned = remat.plans_of(remat.optimize(model, x, budget="100%", planner="greedy")).plans[0]
        >>> planned.answer.overhead, planned.predicted_bytes <= planned.answer.budget_bytes
        (0.0, True)
    """

    step: TrainingStep = field(repr=False)
    answer: Answer
    run: Callable[..., Any] = field(repr=False)
    predicted_bytes: int
    memory: Bytes | None = None
    better: Better[Planned] | None = field(default=None, repr=False)
    job: Job = field(default_factory=Job, repr=False)

    @property
    def activation_bytes(self) -> int:
        """The predicted peak above the fixed bytes: what a measurement of the step sees."""
        return self.predicted_bytes - self.step.graph.fixed_bytes

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all gradients that the step returns."""
        operations = self.step.operations
        return sum(operations.sizes[s] for s in returned_gradients(operations))

    @property
    def update_peak_bytes(self) -> int:
        """The predicted peak of the optimizer's step after it, fixed bytes included.

        There are then all gradients, what the module returned, and the step's own temporaries; no activations.
        """
        step, update = self.step, self.job.update()
        temporaries = update.temporaries_bytes - update.beside_passes_bytes
        if step.operations.updates and not self.gradient_bytes:
            temporaries = 0  # every parameter has been updated by then
        left = step.graph.fixed_bytes + sum(step.operations.sizes[s] for s in step.operations.keep)
        there = step.fixed.get("gradients", 0) + step.fixed.get(VIEWED, 0)
        added = min(there, self.gradient_bytes)  # to gradients that stay or to their buckets, and gone
        return left - added + temporaries
