"""torchtune: a full fine-tuning step as its recipes write it, with its Llama builder and its chunked loss."""

from __future__ import annotations

import torch
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

from .training import VOCABULARY, Training, token_rows


def train(training: Training) -> None:
    model = llama3(vocab_size=VOCABULARY, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=32, max_seq_len=64)
    loss_of = CEWithChunkedOutputLoss(num_output_chunks=4)
    model.set_num_output_chunks(loss_of.num_output_chunks)
    training.enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rows = token_rows(80) + token_rows(80, (20, 16, 24, 12))
    for step in range(40):
        tokens = torch.stack([row["input_ids"] for row in rows[4 * step : 4 * step + (3 if step == 39 else 4)]])
        labels = torch.hstack((tokens[..., 1:], torch.full((len(tokens), 1), loss_of.ignore_index)))
        loss = loss_of(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        training.step(loss)
    training.end("model", model, optimizer)
