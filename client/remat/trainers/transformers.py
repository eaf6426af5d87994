"""For `transformers.Trainer`: a callback in the place of `gradient_checkpointing=True`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..planning.budget import Budget
from ..training.enable import disable, enable


class RematCallback(TrainerCallback):
    """Trains the Trainer's model by plans, in place, from the first step to the last.

    Works as `Trainer(…, callbacks=[RematCallback(budget="12GiB")])`. The key–value cache is switched off while
    training, as gradient checkpointing does too. Each kind of batch is planned when it is first seen: a fixed length
    (`pad_to_multiple_of`, `dataloader_drop_last=True`) keeps their number small.

    Args:
        budget: as for `remat.optimize`.
        options: as for `remat.enable`.
    """

    def __init__(self, budget: Budget, **options: Any) -> None:
        self.budget, self.options = budget, options
        self._cached: bool | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Enable plans on the model, before its first step.

        Raises:
            ValueError: the Trainer checkpoints activations itself.
        """
        if getattr(args, "gradient_checkpointing", False):
            raise ValueError(
                "gradient_checkpointing=True and RematCallback do the same work twice: leave one of them out"
            )
        model: nn.Module = given["model"]
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", None):
            self._cached, config.use_cache = True, False  # type: ignore[union-attr]
        optimizer = given.get("optimizer")
        enable(model, budget=self.budget, **{"optimizer": optimizer, **self.options})

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leave the model as it was."""
        disable(given["model"])
        if self._cached:
            given["model"].config.use_cache = True
