"""PEFT: LoRA on a model in float32, and on frozen weights in bfloat16, as QLoRA's are."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from .training import Training, language_model, token_rows

VARIANTS = ("lora", "frozen_bf16")


def train(training: Training, variant: str) -> None:
    model = language_model(num_hidden_layers=1)
    if variant == "frozen_bf16":
        model = model.to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    training.enable(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2)
    rows = token_rows(160)
    for step in range(40):
        batch = rows[4 * step : 4 * step + (3 if step == 39 else 4)]
        given = {name: torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels")}
        with torch.autocast("cpu", torch.bfloat16, enabled=variant == "frozen_bf16"):
            loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss)
    training.end("model", model, optimizer)
