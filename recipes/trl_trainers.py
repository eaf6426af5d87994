"""TRL's SFTTrainer and DPOTrainer with their defaults: checkpointing, which remat switches off, heads of their own."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from remat.trainers.transformers import RematCallback

from .training import Training, language_model, token_rows, tokenizer, words

VARIANTS = ("sft", "dpo")


class Notes(TrainerCallback):  # type: ignore[misc]
    """Notes losses, and the plans of what the callback before it has enabled."""

    def __init__(self, training: Training, planning: Any) -> None:
        self.training, self.planning = training, planning

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.planning is not None:
            self.training.see(self.planning._module(given["model"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if logs and "loss" in logs:
            self.training.step(logs["loss"])


def train(training: Training, variant: str) -> None:
    model = language_model(num_hidden_layers=1)
    model.save_pretrained(training.folder + "-model")
    model.config.name_or_path = training.folder + "-model"  # from there DPO loads its reference
    planning = RematCallback(**training.options()) if training.planned else None
    if planning is None:
        model.compile(backend="aot_eager")
    texts = [words(row["input_ids"]) for row in token_rows(160)]
    said = [f" {text}" for text in texts]
    rows = {"text": texts} if variant == "sft" else {"prompt": texts, "chosen": said, "rejected": said[::-1]}
    settings: dict[str, Any] = {
        "output_dir": training.folder,
        "max_steps": 40,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    if variant == "sft":
        kind, config = SFTTrainer, SFTConfig(**settings)
    else:
        kind, config = DPOTrainer, DPOConfig(**settings)
    notes = [Notes(training, planning)] if planning is None else [planning, Notes(training, planning)]
    run = kind(model, args=config, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer(), callbacks=notes)
    run.train()
    training.end("model", run.model)
