"""transformers' Trainer: bf16, accumulation, evaluation, resuming, an interrupt, a batch size that is found."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from remat.trainers.transformers import RematCallback

from .training import Training, language_model, token_rows

VARIANTS = ("callback", "by_name", "interrupted", "found_batch_size")


class Notes(TrainerCallback):  # type: ignore[misc]
    """Notes losses, and ends the run once by an error, if there is one."""

    def __init__(self, training: Training, error: BaseException | None = None, at: int = 5) -> None:
        self.training, self.error, self.at = training, error, at

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.training.planned and "forward" in vars(given["model"]) and hasattr(given["model"].forward, "backend"):
            self.training.see(given["model"])
        if self.error is not None and state.global_step == self.at:
            error, self.error = self.error, None
            raise error

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        for name in ("loss", "eval_loss"):
            if logs and name in logs:
                if name == "loss":
                    self.training.step(logs[name])
                else:
                    self.training.found[f"evaluation {state.global_step}"] = torch.tensor(logs[name])


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of several lengths, padded to the longest."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([row["input_ids"] for row in rows], batch_first=True)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": (labels != -100).long()}


def trainer(training: Training, model: Any, notes: Notes, more: list[Any], **settings: Any) -> Trainer:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 42,
        "bf16": True,
        "use_cpu": True,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_steps": 21,
        "lr_scheduler_type": "cosine",
        "report_to": [],
        "seed": 1,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    arguments = TrainingArguments(training.folder, **{**given, **settings})
    data = token_rows(62)
    return Trainer(
        model,
        arguments,
        data_collator=collated,
        train_dataset=data,  # type: ignore[arg-type]
        eval_dataset=data[:8],  # type: ignore[arg-type]
        callbacks=[*more, notes],
    )


def train(training: Training, variant: str) -> None:
    def prepared(model: Any) -> list[Any]:
        if training.planned and variant != "by_name":
            return [RematCallback(**training.options())]
        training.compile(model)
        return []

    errors = {"interrupted": KeyboardInterrupt(), "found_batch_size": torch.OutOfMemoryError("CUDA out of memory.")}
    notes = Notes(training, errors.get(variant), at=20)  # some plans have taken over by then
    model = language_model(attention_dropout=0.1)
    if variant == "found_batch_size":
        run = trainer(training, model, notes, prepared(model), auto_find_batch_size=True, max_steps=60)
        run.train()
    else:
        run = trainer(training, model, notes, prepared(model))
        if variant == "interrupted":
            try:
                run.train()
            except KeyboardInterrupt:
                run.train()
        else:
            run.args.max_steps = 21
            run.train()
            model = language_model(attention_dropout=0.1)
            run = trainer(training, model, notes, prepared(model))
            run.train(resume_from_checkpoint=f"{training.folder}/checkpoint-21")
    training.end("model", run.model)
