"""The networks of Checkmate's Figure 4 as modules to capture: VGG16, MobileNet and U-Net, thinner and on small images.

They are those of `benchmarks.graphs.architectures`, layer by layer, with padding inside the convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from benchmarks.models.subject import CLASSES, Classified

SIDE = 96
"""Of the images, in place of 224 and of 416 × 608."""
THINNER = 4
"""By which the channels of the paper's networks are divided, so that a step fits on one core."""

Call = tuple[nn.Module, Mapping[str, torch.Tensor]]


def _convs(now: int, counts: tuple[int, ...]) -> tuple[nn.ModuleList, int]:
    """VGG's blocks, each with the pooling that ends it, and the channels that they give."""
    blocks = nn.ModuleList()
    for count, channels in zip(counts, (64, 128, 256, 512, 512), strict=False):
        layers: list[nn.Module] = []
        for _ in range(count):
            layers += [nn.Conv2d(now, channels // THINNER, 3, padding=1), nn.ReLU()]
            now = channels // THINNER
        blocks.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    return blocks, now


def vgg16(batch: int) -> Call:
    """VGG16 (Simonyan and Zisserman, 2014)."""
    blocks, width = _convs(3, (2, 2, 3, 3, 3))
    hidden = 4096 // THINNER**2
    head = (nn.Linear(width * (SIDE // 32) ** 2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    body = nn.Sequential(*(layer for block in blocks for layer in block), nn.Flatten(), *head)
    return _classes(nn.Sequential(*body, nn.Linear(hidden, CLASSES)), batch)


def mobilenet(batch: int) -> Call:
    """MobileNet v1 (Howard et al., 2017)."""
    now = 32 // THINNER
    layers: list[nn.Module] = [nn.Conv2d(3, now, 3, 2, 1, bias=False), nn.BatchNorm2d(now), nn.ReLU()]
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    channels = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
    for stride, width in zip(strides, channels, strict=True):
        out = width // THINNER
        layers += [nn.Conv2d(now, now, 3, stride, 1, groups=now, bias=False), nn.BatchNorm2d(now), nn.ReLU()]
        layers += [nn.Conv2d(now, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        now = out
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.001), nn.Linear(now, CLASSES))
    return _classes(nn.Sequential(*layers, *head), batch)


class UNet(nn.Module):
    """VGG16's first four blocks down, and as many convolutions up, each but the last next to what a block gave."""

    def __init__(self) -> None:
        super().__init__()
        self.down, now = _convs(3, (2, 2, 3, 3))
        self.up = nn.ModuleList()
        for channels, skip in zip((512, 256, 128, 64), (256, 128, 64, 0), strict=True):
            out = channels // THINNER
            self.up.append(nn.Sequential(nn.Conv2d(now, out, 3, padding=1), nn.BatchNorm2d(out)))
            now = out + skip // THINNER
        self.score = nn.Conv2d(now, CLASSES, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores at half of the image's height and width."""
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(x)
            if skips:
                x = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1)
        scores: torch.Tensor = self.score(x)
        return scores


def unet(batch: int) -> Call:
    """U-Net (Ronneberger et al., 2015)."""
    return _classes(UNet(), batch, (SIDE // 2, SIDE // 2))


def _classes(inner: nn.Module, batch: int, places: tuple[int, ...] = ()) -> Call:
    labels = (torch.arange(batch) % CLASSES).reshape(batch, *(1 for _ in places)).expand(batch, *places).contiguous()
    return Classified(inner), {"pixels": torch.randn(batch, 3, SIDE, SIDE), "labels": labels}


NETWORKS: dict[str, Callable[[int], Call]] = {"vgg16": vgg16, "mobilenet": mobilenet, "unet": unet}
"""By name: what makes one in train mode with a batch of so many images."""
