"""For Lightning: a callback that trains a module, or a part of it, by plans."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..planning.budget import Budget
from ..training.enable import disable, enable


class RematCallback(Callback):
    """Trains `module.<part>` by plans, in place, while `fit` runs.

    Works as `Trainer(callbacks=[RematCallback(budget="12GiB", part="model")])`. What is planned is the `forward` of the
    part: a LightningModule whose `training_step` calls `self.model(batch)` names "model"; one whose training step calls
    `self(batch)` names no part.

    Args:
        budget: as for `remat.optimize`.
        part: dotted name of the submodule; empty for the LightningModule itself.
        options: as for `remat.enable`.
    """

    def __init__(self, budget: Budget, part: str = "", **options: Any) -> None:
        super().__init__()
        self.budget, self.part, self.options = budget, part, options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enable plans before the first step."""
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        enable(self._module(pl_module), budget=self.budget, **{"optimizer": optimizer, **self.options})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        disable(self._module(pl_module))

    def _module(self, module: nn.Module) -> nn.Module:
        return module.get_submodule(self.part)
