"""Small models whose plans under Inductor are tested: residuals, convolutions, levels, with dropout and statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual around two layers with dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.body(x)
        return made


class Net(nn.Module):
    """Blocks and a loss; with `norm`, batch statistics and a counter that are updated in place."""

    def __init__(self, norm: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(32) for _ in range(blocks)))
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x)).square().mean()


INPUT = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


class Convolutions(nn.Module):
    """A residual block with batch statistics and dropout, and a head that reads a mean of the last activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 1, 1)
        self.body = nn.Sequential(
            nn.Conv2d(8, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(16, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
        )
        self.around = nn.Conv2d(8, 16, 1, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        made = torch.relu(self.body(first) + self.around(first))
        return self.head(made.mean((2, 3))).square().mean()


class Levels(nn.Module):
    """Two levels of a U-Net with group statistics, whose decomposition reads its scales by strides, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = self.level(3, 16), self.level(16, 16), self.level(32, 16)
        self.last = nn.Conv2d(16, 3, 1)

    @staticmethod
    def level(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, 1, 1), nn.GroupNorm(8, outer), nn.SiLU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.down(x)
        made = F.interpolate(self.middle(F.avg_pool2d(kept, 2)), scale_factor=2.0)
        return F.mse_loss(self.last(self.up(torch.cat((made, kept), 1))), x)


IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """A few layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Mixer(nn.Module):
    """Layer norms, and layers over the tokens and over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(64), nn.LayerNorm(64)
        self.tokens, self.channels = (
            nn.Sequential(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64)) for wide in (128, 256)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        made: torch.Tensor = x + self.channels(self.two(x))
        return made


class Mixers(nn.Module):
    """Two mixer blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Mixer(), Mixer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Next(nn.Module):
    """A small ConvNeXt of transformers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ConvNextConfig, ConvNextForImageClassification

        config = ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10, image_size=64)  # type: ignore[call-arg]
        self.inner = ConvNextForImageClassification(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).logits.square().mean()
