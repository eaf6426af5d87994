"""Callbacks for the tools that training jobs are written with; each imports its own tool, and only when it is used."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from ..planning.budget import Budget
from ..planning.options import SolveOptions, TrainingFields, solve_options
from ..planning.planner import Planner
from ..planning.sources import OnProgress
from ..training.enable import carriers_of, disable, enable
from ..training.optimize import check_training


class PlannedRuns:
    """What the callbacks of all trainers have: how plans are made, and the module that trains by them during a run.

    The arguments are those of the callbacks.
    """

    kind: str
    """Which trainer it is, by name."""

    def __init__(
        self,
        budget: Budget,
        part: str = "",
        *,
        planner: Planner | str | None = None,
        optimizer: Any = None,
        on_progress: OnProgress | None = None,
        options: SolveOptions | None = None,
        **fields: Unpack[TrainingFields],
    ) -> None:
        super().__init__()
        self.budget, self.part, self.planner, self.optimizer = budget, part, planner, optimizer
        self.on_progress = on_progress
        self.options = solve_options(type(self), TrainingFields, options, fields)
        self._planned: nn.Module | None = None
        alone = replace(self.options, ranks=False)  # a trainer joins the ranks later
        check_training(budget, alone, planner, optimizer)

    def begin(self, model: nn.Module, optimizer: Any, *, accumulate: int, clips: bool) -> None:
        """Enable plans for one run.

        What a run has left that an exception has ended, of which the trainer tells no callback, is undone first.

        Args:
            optimizer: the trainer's.
            accumulate, clips: backward passes to a step of the optimizer, and whether gradients are clipped by their
                norm, as the trainer does.

        Raises:
            RuntimeError: the user has enabled plans already.
        """
        if any(left.trainer == self.kind for left in carriers_of(model)):
            disable(model)
        steps, clips = max(self.options.accumulate, accumulate), self.options.clip_grad_norm or clips
        enable(
            model,
            budget=self.budget,
            planner=self.planner,
            optimizer=self.optimizer or optimizer,
            on_progress=self.on_progress,
            options=replace(self.options, accumulate=steps, clip_grad_norm=clips),
        )
        self._planned = model
        config: Any = getattr(model, "config", None)
        for carrier in carriers_of(model):
            carrier.trainer = self.kind
            if getattr(config, "use_cache", None):
                config.use_cache = False
                carrier.undo = functools.partial(setattr, config, "use_cache", True)  # type: ignore[method-assign]

    def leave(self) -> None:
        """Leave the module as it was."""
        module, self._planned = self._planned, None
        if module is not None:
            disable(module)
