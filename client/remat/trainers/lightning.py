"""For Lightning: a callback that trains a module, or a part of it, by plans."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from . import PlannedRuns


class RematCallback(PlannedRuns, Callback):
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

    kind = "lightning"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enable plans before the first step."""
        only = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        steps = trainer.accumulate_grad_batches
        self.begin(pl_module.get_submodule(self.part), only, accumulate=steps, clips=clips)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        self.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was; `on_fit_end` is not called."""
        self.leave()
