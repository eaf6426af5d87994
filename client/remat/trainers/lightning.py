"""For Lightning: a callback that trains a module, or a part of it, by plans."""

from __future__ import annotations

from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..planning.budget import Budget
from ..planning.options import SolveOptions, TrainingFields, solve_options
from ..planning.planner import Planner
from ..planning.sources import OnProgress
from ..training.enable import disable, enable_for
from ..training.optimize import check_training


class RematCallback(Callback):
    """Trains `module.<part>` by plans, in place, while `fit` runs.

    Works as `Trainer(callbacks=[RematCallback(budget="12GiB", part="model")])`. What is planned is the `forward` of the
    part: a LightningModule whose `training_step` calls `self.model(batch)` names "model"; one whose training step calls
    `self(batch)` names no part.

    Args:
        budget: as for `remat.optimize`.
        part: dotted name of the submodule; empty for the LightningModule itself.
        planner, on_progress, options, fields: as for `remat.enable`.
        optimizer: in place of the Trainer's.

    Raises:
        InvalidData: as for `remat.enable`.
    """

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
        self.options = solve_options(RematCallback, TrainingFields, options, fields)
        self._enabled: nn.Module | None = None
        check_training(budget, self.options, planner, optimizer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enable plans before the first step."""
        only = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        module = pl_module.get_submodule(self.part)
        enable_for(
            "lightning",
            module,
            self.options,
            accumulate=trainer.accumulate_grad_batches,
            clips=bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value",
            budget=self.budget,
            planner=self.planner,
            optimizer=self.optimizer or only,
            on_progress=self.on_progress,
        )
        self._enabled = module

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was; `on_fit_end` is not called."""
        self._leave()

    def _leave(self) -> None:
        module, self._enabled = self._enabled, None
        if module is not None:
            disable(module)
