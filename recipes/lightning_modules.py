"""Lightning: bf16-mixed with accumulation and resuming, and a GAN with manual optimization and toggled networks."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from remat.trainers.lightning import RematCallback

from .training import Training

VARIANTS = ("mixed", "gan")


def layers(*widths: int) -> nn.Module:
    pairs = itertools.pairwise(widths)
    return Wrapped(nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)) for a, b in pairs)))


class Wrapped(nn.Module):
    """A module whose class is not torch's own, which `model.compile` needs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Mixed(pl.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_of = [training]
        self.model = layers(16, *[32] * 6, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.model(batch).squeeze(-1) - batch.mean(-1)).square().mean()
        self.training_of[0].step(loss)
        self.training_of[0].see(self.model)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Gan(pl.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.training_of = [training]
        self.makes, self.judges = layers(8, *[32] * 5, 16), layers(16, *[32] * 5, 1)
        for part in (self.makes, self.judges):
            training.enable(part)

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        noise = torch.randn(len(batch), 8)
        self.toggle_optimizer(first)
        loss = nn.functional.softplus(-self.judges(self.makes(noise))).mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = nn.functional.softplus(self.judges(self.makes(noise).detach())).mean()
        other = other + nn.functional.softplus(-self.judges(batch)).mean()
        self.manual_backward(other)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.training_of[0].step(loss.detach() + other.detach())

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.makes, self.judges)]


def train(training: Training, variant: str) -> None:
    data = DataLoader(torch.randn(3776, 16, generator=torch.Generator().manual_seed(1)), batch_size=256)  # type: ignore[arg-type]
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": training.folder,
    }
    if variant == "gan":
        model: Any = Gan(training)
        pl.Trainer(max_epochs=3, enable_checkpointing=False, **settings).fit(model, data)
        training.end("model", model)
        return
    settings |= {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "enable_checkpointing": False}
    checkpoint = None
    for epochs in (3, 6):  # the smaller batch that ends each: a plan, what takes over from it, and that once more
        model = Mixed(training)
        callbacks = [RematCallback(part="model", **training.options())] if training.planned else []
        if not training.planned:
            model.model.compile(backend="aot_eager")
        run = pl.Trainer(max_epochs=epochs, callbacks=callbacks, **settings)
        run.fit(model, data, ckpt_path=checkpoint)
        checkpoint = training.folder + ".ckpt"
        run.save_checkpoint(checkpoint)
    training.end("model", model)
