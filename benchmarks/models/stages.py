"""Sequential networks like ResNet and DenseNet, as lists of stages that end in the loss, small enough for a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

CLASSES = 10


class Residual(nn.Module):
    """Two 3×3 convolutions next to a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and width == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3×3 convolution of a quarter of the width between two 1×1 ones, next to a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        inner = out // 4
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and width == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class Dense(nn.Module):
    """A layer that appends its features to what it reads."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


class Loss(nn.Module):
    """The classifier, and the cross-entropy of labels that are given once and for all."""

    def __init__(self, width: int, batch: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)
        self.register_buffer("labels", torch.arange(batch) % CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.linear(x.mean((2, 3))), self.labels)


def resnet(blocks: tuple[int, ...], bottleneck: bool, width: int, batch: int) -> list[nn.Module]:
    """A stem, blocks in groups that halve the image and double the width, and the loss."""
    make = Bottleneck if bottleneck else Residual
    stages: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    ]
    now = width
    for group, count in enumerate(blocks):
        for i in range(count):
            out = width * 2**group * (4 if bottleneck else 1)
            stages.append(make(now, out, 2 if group and not i else 1))
            now = out
    return [*stages, Loss(now, batch)]


def densenet(layers: tuple[int, ...], growth: int, batch: int) -> list[nn.Module]:
    """A stem, groups of dense layers with transitions that halve image and width between them, and the loss."""
    now = 2 * growth
    stages: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, now, 3, 1, 1, bias=False), nn.BatchNorm2d(now), nn.ReLU())]
    for group, count in enumerate(layers):
        for _ in range(count):
            stages.append(Dense(now, growth))
            now += growth
        if group + 1 < len(layers):
            shrink = [nn.BatchNorm2d(now), nn.ReLU(), nn.Conv2d(now, now // 2, 1, bias=False), nn.AvgPool2d(2)]
            stages.append(nn.Sequential(*shrink))
            now //= 2
    return [*stages, Loss(now, batch)]


MODELS = ("resnet18", "resnet34", "resnet50", "densenet33", "densenet57")
"""Depths as the papers count them, with fewer layers in the last groups of the dense ones."""

_SIZES = {
    "resnet18": ((64, 32), (16, 64)),
    "resnet34": ((32, 32), (8, 64)),
    "resnet50": ((16, 32), (4, 64)),
    "densenet33": ((32, 32), (8, 64)),
    "densenet57": ((16, 32), (4, 64)),
}


def build(name: str) -> Iterator[tuple[str, list[nn.Module], torch.Tensor]]:
    """A model for each of its input sizes, as (batch × image, stages, input).

    Raises:
        KeyError: no model has that name.
    """
    for batch, image in _SIZES[name]:
        torch.manual_seed(0)
        stages = {
            "resnet18": lambda b=batch: resnet((2, 2, 2, 2), False, 16, b),
            "resnet34": lambda b=batch: resnet((3, 4, 6, 3), False, 16, b),
            "resnet50": lambda b=batch: resnet((3, 4, 6, 3), True, 16, b),
            "densenet33": lambda b=batch: densenet((4, 6, 4), 16, b),
            "densenet57": lambda b=batch: densenet((6, 12, 8), 16, b),
        }[name]()
        yield f"{batch} × {image}²", stages, torch.randn(batch, 3, image, image)
