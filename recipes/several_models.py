"""Two towers as CLIP's, distillation with a frozen teacher, and a critic with a gradient penalty (WGAN-GP)."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from .training import Training

VARIANTS = ("two_towers", "distillation", "gradient_penalty")


class Tower(nn.Module):
    """Layers with dropout."""

    def __init__(self, width: int, out: int = 16, hidden: int = 32) -> None:
        super().__init__()
        pairs = itertools.pairwise((width, *[hidden] * 6))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)) for a, b in pairs)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(hidden, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.head(x)


class Penalized(nn.Module):
    """A critic that gives the penalty on its slope, too: its own gradient is taken inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        deep = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.Tanh())]
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), *deep, nn.Linear(32, 1))

    def forward(self, real: torch.Tensor, made: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * penalty


def train(training: Training, variant: str) -> None:
    # Dynamo has a switch for gradients inside of what it traces, which remat sets by itself
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        trained(training, variant)


def trained(training: Training, variant: str) -> None:
    generator = torch.Generator().manual_seed(1)
    first = Penalized() if variant == "gradient_penalty" else Tower(8)
    second = Tower(12) if variant == "two_towers" else Tower(8, hidden=64)
    if variant == "distillation":
        second.requires_grad_(False).eval()
    models = [first] if variant == "gradient_penalty" else [first, second]
    for model in models:
        training.enable(model)
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters() if p.requires_grad], 1e-2)
    for step in range(42):
        rows = (256, 384, 512)[step // 4 % 3]
        x, other = (torch.randn(rows, width, generator=generator) for width in (8, 12))
        if variant == "gradient_penalty":
            made, mix = torch.randn(rows, 8, generator=generator), torch.rand(rows, 1, generator=generator)
            loss = first(x, made, (mix * x + (1 - mix) * made).requires_grad_())
        elif variant == "distillation":
            loss = F.kl_div(first(x).log_softmax(-1), second(x).softmax(-1), reduction="batchmean")
        else:
            scores = F.normalize(first(x), dim=-1) @ F.normalize(second(other), dim=-1).t()
            loss = F.cross_entropy(10 * scores, torch.arange(rows)) + F.cross_entropy(
                10 * scores.t(), torch.arange(rows)
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss)
    for i, model in enumerate(models):
        training.end(f"model {i}", model)
