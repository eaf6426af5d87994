"""One kind of training step with its plan: what was captured, what was answered, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from remat_ir import Answer

from ..capture.guards import Holders
from ..planning.coordinator import Pending
from .step import TrainingStep


@dataclass(frozen=True, eq=False)
class Planned:
    """One kind of training step that has its plan.

    Attributes:
        step: what was captured and profiled.
        answer: the planner's answer, verified on `step.graph`.
        run: the step by the plan: see `StepFunction`.
        predicted_bytes: the peak of the running step as lowered, fixed bytes included; at most the plan's peak.
        better: the plan that is still being looked for, where training started on a quick one; None in it: there is
            none that is better.
    """

    step: TrainingStep
    answer: Answer
    run: Callable[..., Any] = field(repr=False)
    predicted_bytes: int
    better: Pending[Planned] | None = field(default=None, repr=False)

    @cached_property
    def holders(self) -> Holders:
        """Where the tensors are that `run` takes first."""
        captured = self.step.captured
        return Holders((*captured.params, *captured.buffers), captured.guards)

    @cached_property
    def overwritten(self) -> tuple[int, ...]:
        """Which of those tensors the step writes to, by position."""
        flow = self.step.operations.flow
        held = flow.primals[: len(self.holders.names)]
        return tuple(n for n, primal in enumerate(held) if primal in flow.mutated)

    @property
    def activation_bytes(self) -> int:
        """The predicted peak above the fixed bytes: what a measurement of the step sees."""
        return self.predicted_bytes - self.step.graph.fixed_bytes
