"""For `transformers.Trainer`: a callback in the place of `gradient_checkpointing=True`."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from . import PlannedRuns

log = logging.getLogger("remat")
_TILED = "fused_lm_head"
"""The argument by which `trl.trainer.utils.add_fused_lm_head` has the head of a model run in tiles."""


class RematCallback(PlannedRuns, TrainerCallback):
    """Trains the Trainer's model by plans, in place, from the first step to the last.

    Works as `Trainer(…, callbacks=[RematCallback(budget="12GiB")])`. The key–value cache is switched off while
    training, as gradient checkpointing does too. Each kind of batch is planned when it is first seen: a fixed length
    (`pad_to_multiple_of`, `dataloader_drop_last=True`) keeps their number small.

    `gradient_checkpointing=True`, the default of TRL's configs, is switched off meanwhile, with a line in the log: both
    would do the same work.

    With a head of TRL's, as `SFTTrainer` puts it on a model (per-token log-probabilities in tiles, by an autograd
    function of its own), the model's trunk is planned, and the head runs as it is.

    Args:
        budget: as for `remat.optimize`; of the planned part, where one is planned.
        part: dotted name of the submodule that is planned, such as "model"; empty for the model itself, or for its
            trunk where it has a head of TRL's.
        planner, on_progress, options, fields: as for `remat.enable`.
        optimizer: in place of the Trainer's.

    Raises:
        InvalidData: as for `remat.enable`.
    """

    kind = "transformers"
    _checkpointed: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Enable plans on the model, before its first step; those of a run that an exception has ended are dropped."""
        whole = given["model"]
        if getattr(whole, "is_gradient_checkpointing", False):
            whole.gradient_checkpointing_disable()
            self._checkpointed = whole
            log.info("gradient_checkpointing is off while remat plans this model: both would recompute the same values")
        steps, clips = args.gradient_accumulation_steps, bool(args.max_grad_norm)
        self.begin(self._module(whole), given.get("optimizer"), accumulate=steps, clips=clips)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leave the model as it was."""
        self.leave()
        if self._checkpointed is not None:
            more = getattr(args, "gradient_checkpointing_kwargs", None)
            self._checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs=more)
            self._checkpointed = None

    def _module(self, model: nn.Module) -> nn.Module:
        """What is planned."""
        if self.part:
            return model.get_submodule(self.part)
        whole = next((part for part in model.modules() if _has_fused_head(part)), None)
        return model if whole is None else whole.get_submodule(str(whole.base_model_prefix))


def _has_fused_head(part: nn.Module) -> bool:
    """Whether TRL has given a model a head that computes log-probabilities in tiles."""
    forward: Any = part.__dict__.get("forward") if isinstance(part, PreTrainedModel) else None
    while forward is not None:  # Accelerate wraps it again
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None and _TILED in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
