"""A plain loop: accumulation, clipping, EMA, a cosine schedule, evaluation, resuming with the generators' states."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn

from .training import Training

VARIANTS = ("fp32", "bf16_autocast", "bf16_parameters", "fp16_with_scaler")


class Net(nn.Module):
    """Convolutions with batch norm and dropout, on images of any size."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.GELU())
            for a, b in itertools.pairwise(widths)
        )
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x.mean((2, 3))))


def batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """An epoch of eight steps of two batches each; the images of some are larger, the last batch is smaller."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(16):
        rows, size = 5 if i == 15 else 8, 12 if i % 4 == 2 else 8
        x = torch.randn(rows, 3, size, size, generator=generator).to(dtype)
        found.append((x, torch.randint(0, 5, (rows,), generator=generator)))
    return found


class Loop:
    """All that a training has, as it is written to a checkpoint."""

    def __init__(self, training: Training, variant: str) -> None:
        self.training = training
        self.dtype = torch.bfloat16 if variant == "bf16_parameters" else torch.float32
        self.cast = {"bf16_autocast": torch.bfloat16, "fp16_with_scaler": torch.float16}.get(variant)
        self.model = Net().to(self.dtype)
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 48)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=variant == "fp16_with_scaler")
        training.enable(self.model)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.cast or torch.bfloat16, enabled=self.cast is not None):
            return nn.functional.cross_entropy(self.model(x).float(), y)

    def epoch(self) -> None:
        data = batches(self.dtype)
        for i in range(0, len(data), 2):
            total = torch.zeros(())
            for batch in data[i : i + 2]:
                loss = self.loss(*batch) / 2
                self.scaler.scale(loss).backward()
                total += loss.detach()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for kept, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    kept.lerp_(now, 0.1)
            self.training.step(total)
        self.model.eval()
        with torch.no_grad():
            self.training.found[f"evaluation {self.training.steps}"] = self.loss(*data[0])
        self.model.train()

    def save(self) -> None:
        parts = {
            name: getattr(self, name).state_dict() for name in ("model", "average", "optimizer", "schedule", "scaler")
        }
        torch.save({"parts": parts, "generator": torch.get_rng_state()}, self.training.folder + ".pt")

    def load(self) -> None:
        there = torch.load(self.training.folder + ".pt")
        for name, state in there["parts"].items():
            getattr(self, name).load_state_dict(state)
        torch.set_rng_state(there["generator"])


def train(training: Training, variant: str) -> None:
    training.budget = training.budget if variant == "fp32" else "85%"  # of half precision one op alone needs 75 %
    loop = Loop(training, variant)
    for _ in range(3):
        loop.epoch()
    loop.save()
    resumed = Loop(training, variant)
    resumed.load()
    for _ in range(3):
        resumed.epoch()
    training.end("model", resumed.model, resumed.optimizer)
    training.end("average", resumed.average)
