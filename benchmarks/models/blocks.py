"""Small networks of blocks with dropout, each of which may be checkpointed."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models.subject import CLASSES, Subject, architecture, classified, numbers


class Checkpointable(nn.Module):
    """A network that runs its blocks under checkpoints when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpointed = False

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        made: torch.Tensor = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return made


class Residual(nn.Module):
    """Two convolutions with batch statistics, dropout between them, and the way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)])
        self.drop = nn.Dropout(0.1)
        self.around = nn.Conv2d(inner, outer, 1, stride) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        y = self.drop(torch.relu(self.norms[0](self.one(x))))
        return torch.relu(self.norms[1](self.two(y)) + self.around(x))


class ResNet(Checkpointable):
    """Six residual blocks of 24 to 96 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, 1, 1)
        pairs = itertools.pairwise([24, 24, 24, 48, 48, 96, 96])
        self.blocks = nn.ModuleList(Residual(a, b, 1 if a == b else 2) for a, b in pairs)
        self.head = nn.Linear(96, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.first(pixels)
        for block in self.blocks:
            x = self.run(block, x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


@architecture("small")
def dropout_resnet(size: str) -> Subject:
    """A residual network: 6 blocks of 24 to 96 channels with batch statistics, 16 images of 48x48, dropout 0.1."""
    return classified("ResNet with dropout", ResNet(), 16, 48, ("Residual",))


class Double(nn.Module):
    """Two convolutions with group statistics and dropout."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, 1, 1),
            nn.GroupNorm(8, outer),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Conv2d(outer, outer, 3, 1, 1),
            nn.GroupNorm(8, outer),
            nn.SiLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        made: torch.Tensor = self.body(x)
        return made


class UNet(Checkpointable):
    """Two levels and a middle, and the loss of rebuilding the input."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32)
        self.down = nn.ModuleList(Double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = Double(32, 32)
        self.up = nn.ModuleList(Double(a + b, b) for a, b in ((32, 32), (32, 16)))
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The mean square error."""
        x, kept = pixels, []
        for block in self.down:
            x = self.run(block, x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.run(self.middle, x)
        for block in self.up:
            x = self.run(block, torch.cat((F.interpolate(x, scale_factor=2.0), kept.pop()), 1))
        return F.mse_loss(self.last(x), pixels)


@architecture("small")
def dropout_unet(size: str) -> Subject:
    """A U-Net: two levels of 16 and 32 channels and a middle, group statistics, 8 images of 64x64, dropout 0.1."""
    return Subject("U-Net with dropout", UNet(), {"pixels": numbers(8, 3, 64, 64)}, ("Double",))
