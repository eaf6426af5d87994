"""timm: a vision transformer with label smoothing and drop path. Its import needs torchvision."""

from __future__ import annotations

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy

from .training import Training


def train(training: Training) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, img_size=32, patch_size=4, depth=2, embed_dim=32, num_heads=2,
        dynamic_img_size=True, drop_path_rate=0.1,
    )  # fmt: skip
    training.enable(model)
    optimizer, loss_of = torch.optim.AdamW(model.parameters(), 1e-3), LabelSmoothingCrossEntropy()
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        rows, size = 3 if step % 10 == 9 else 4, 48 if step % 4 == 2 else 32
        x = torch.randn(rows, 3, size, size, generator=generator)
        loss = loss_of(model(x), torch.randint(0, 5, (rows,), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss)
    training.end("model", model, optimizer)
