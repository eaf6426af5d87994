"""Accelerate's own loop: prepared model, optimizer and data, bf16, accumulation, clipping."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from .plain_loop import Net, batches
from .training import Training


def train(training: Training) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = Net()
    training.enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = DataLoader(batches(torch.float32), batch_size=None)  # type: ignore[arg-type]
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for _ in range(3):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            training.step(loss)
    training.end("model", accelerator.unwrap_model(model))
