"""Callbacks of trainers, in runs that an exception ends; models that are saved whole after they were planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import remat
from remat.trainers.transformers import RematCallback
from remat.training.enable import plans_of

CONFIG = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8, bos_token_id=1, eos_token_id=2)
TOKENS = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


class Stops(TrainerCallback):  # type: ignore[misc]
    """Raises once, at the second step, when the model is running by a plan."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert plans_of(given["model"]).plans
        error, self.error = self.error, None
        if error is not None:
            raise error


def trainer(tmp_path: Path, model: nn.Module, *callbacks: Any, **settings: Any) -> Trainer:
    given = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), **{**given, **settings})
    return Trainer(model, arguments, train_dataset=ROWS, callbacks=list(callbacks))  # type: ignore[arg-type]


def planning() -> RematCallback:
    return RematCallback("100%", planner="greedy")


@pytest.mark.parametrize("again", ["the same trainer", "another"])
def test_transformers_trains_again_after_an_exception(tmp_path: Path, again: str) -> None:
    model = GPT2LMHeadModel(CONFIG)
    run = trainer(tmp_path, model, planning(), Stops(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    if again == "another":
        run = trainer(tmp_path, model, planning())
    run.train()
    assert "forward" not in vars(model)


def test_a_cache_is_switched_on_again_by_disable_after_an_exception(tmp_path: Path) -> None:
    """Transformers 5's own Trainer switches it off, too, before it calls `on_train_begin`."""
    model, arguments = GPT2LMHeadModel(CONFIG), TrainingArguments(str(tmp_path), use_cpu=True)
    model.config.use_cache = True
    for _ in range(2):  # the first run ends without on_train_end
        planning().on_train_begin(arguments, None, None, model=model)
        assert not model.config.use_cache
    remat.disable(model)
    assert model.config.use_cache


def test_transformers_finds_a_batch_size(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, GPT2LMHeadModel(CONFIG), planning(), Stops(torch.OutOfMemoryError("CUDA out of memory.")),
        auto_find_batch_size=True,
    )  # fmt: skip
    run.train()
    assert run._train_batch_size < 4


def test_plans_that_the_user_has_enabled_stay(tmp_path: Path) -> None:
    model = remat.enable(GPT2LMHeadModel(CONFIG), budget="100%", planner="greedy")
    with pytest.raises(RuntimeError, match="enabled on this GPT2LMHeadModel already"):
        trainer(tmp_path, model, planning()).train()
    assert plans_of(model) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("stop")])
def test_lightning_leaves_the_module_after_an_exception(tmp_path: Path, error: BaseException) -> None:
    import lightning.pytorch as pl

    from remat.trainers.lightning import RematCallback as Planning

    class Module(pl.LightningModule):
        stops = True

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch[0]).sum()
            assert plans_of(self.model).plans
            if self.stops:
                raise error
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit() -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(
            max_steps=1, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path,
            callbacks=[Planning("100%", part="model", planner="greedy")], **quiet,
        ).fit(module, data)  # fmt: skip

    module, data = Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 8)))
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit()
    assert "forward" not in vars(module.model)
    module.stops = False
    fit()


def test_a_model_that_was_planned_is_saved_whole(tmp_path: Path) -> None:
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=2))
    remat.enable(model, budget="100%", planner="greedy")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    remat.disable(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_states_that_a_call_asks_for_are_recorded_in_a_planned_step() -> None:
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=2))
    plain = model(input_ids=TOKENS, labels=TOKENS, output_hidden_states=True).hidden_states
    model = LlamaForCausalLM(model.config).train()
    remat.enable(model, budget="100%", planner="greedy")
    planned = model(input_ids=TOKENS, labels=TOKENS, output_hidden_states=True).hidden_states
    assert len(planned) == len(plain) == 3
