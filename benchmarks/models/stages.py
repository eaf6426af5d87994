"""ResNet, DenseNet and Inception v3 as lists of stages that end in the loss: narrow ones to train on a CPU, and the
networks of RR-9302, Section 5.3, as they are, to profile.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

CLASSES = 10


class Residual(nn.Module):
    """Convolutions next to a shortcut: two of 3×3; or of a quarter of the width, 3×3 between two of 1×1."""

    def __init__(self, width: int, out: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            inner = out // 4
            convs = [(width, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1)]
        else:
            convs = [(width, out, 3, stride), (out, out, 3, 1)]
        layers: list[nn.Module] = []
        for now, channels, kernel, step in convs:
            conv = nn.Conv2d(now, channels, kernel, step, kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
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


class Branches(nn.Module):
    """What several branches make of one input, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def stem(width: int, large: bool) -> nn.Module:
    """The first stage: a 3×3 convolution, or for large images one of 7×7 and a pooling, both of stride 2."""
    conv = nn.Conv2d(3, width, 7, 2, 3, bias=False) if large else nn.Conv2d(3, width, 3, 1, 1, bias=False)
    pool = (nn.MaxPool2d(3, 2, 1),) if large else ()
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(), *pool)


def resnet(
    blocks: tuple[int, ...], bottleneck: bool, width: int, batch: int, *, large: bool = False
) -> list[nn.Module]:
    """A stem, blocks in groups that halve the image and double the width, and the loss."""
    stages: list[nn.Module] = [stem(width, large)]
    now = width
    for group, count in enumerate(blocks):
        for i in range(count):
            out = width * 2**group * (4 if bottleneck else 1)
            stages.append(Residual(now, out, 2 if group and not i else 1, bottleneck))
            now = out
    return [*stages, Loss(now, batch)]


def densenet(layers: tuple[int, ...], growth: int, batch: int, *, large: bool = False) -> list[nn.Module]:
    """A stem, groups of dense layers with transitions that halve image and width between them, and the loss."""
    now = 2 * growth
    stages: list[nn.Module] = [stem(now, large)]
    for group, count in enumerate(layers):
        for _ in range(count):
            stages.append(Dense(now, growth))
            now += growth
        if group + 1 < len(layers):
            shrink = [nn.BatchNorm2d(now), nn.ReLU(), nn.Conv2d(now, now // 2, 1, bias=False), nn.AvgPool2d(2)]
            stages.append(nn.Sequential(*shrink))
            now //= 2
    return [*stages, Loss(now, batch)]


Conv = tuple[int, int, int, int]
"""Channels, height and width of the kernel, stride."""


def inception(batch: int, divisor: int = 1) -> list[nn.Module]:
    """Inception v3 without its auxiliary head; every width divided by `divisor`."""

    def convs(now: int, *layers: Conv, padded: bool = True) -> nn.Sequential:
        made: list[nn.Module] = []
        for channels, height, width, stride in layers:
            out = channels // divisor
            padding = (height // 2, width // 2) if padded and stride == 1 else 0
            made += [nn.Conv2d(now, out, (height, width), stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            now = out
        return nn.Sequential(*made)

    def pooled(now: int, channels: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), *convs(now, (channels, 1, 1, 1)))

    def forked(now: int, *layers: Conv) -> nn.Sequential:
        last = layers[-1][0] // divisor
        return nn.Sequential(*convs(now, *layers), Branches(convs(last, (384, 1, 3, 1)), convs(last, (384, 3, 1, 1))))

    stages: list[nn.Module] = [
        convs(3, (32, 3, 3, 2), padded=False),
        convs(32 // divisor, (32, 3, 3, 1), padded=False),
        nn.Sequential(*convs(32 // divisor, (64, 3, 3, 1)), nn.MaxPool2d(3, 2)),
        convs(64 // divisor, (80, 1, 1, 1)),
        nn.Sequential(*convs(80 // divisor, (192, 3, 3, 1), padded=False), nn.MaxPool2d(3, 2)),
    ]
    now = 192 // divisor
    for pool in (32, 64, 64):
        five, threes = ((48, 1, 1, 1), (64, 5, 5, 1)), ((64, 1, 1, 1), (96, 3, 3, 1), (96, 3, 3, 1))
        stages.append(Branches(convs(now, (64, 1, 1, 1)), convs(now, *five), convs(now, *threes), pooled(now, pool)))
        now = (64 + 64 + 96) // divisor + pool // divisor
    threes = ((64, 1, 1, 1), (96, 3, 3, 1), (96, 3, 3, 2))
    stages.append(Branches(convs(now, (384, 3, 3, 2)), convs(now, *threes), nn.MaxPool2d(3, 2)))
    now += (384 + 96) // divisor
    for c in (128, 160, 160, 192):
        sevens = ((c, 1, 1, 1), (c, 1, 7, 1), (192, 7, 1, 1))
        twice = ((c, 1, 1, 1), (c, 7, 1, 1), (c, 1, 7, 1), (c, 7, 1, 1), (192, 1, 7, 1))
        stages.append(Branches(convs(now, (192, 1, 1, 1)), convs(now, *sevens), convs(now, *twice), pooled(now, 192)))
        now = 4 * (192 // divisor)
    sevens = ((192, 1, 1, 1), (192, 1, 7, 1), (192, 7, 1, 1), (192, 3, 3, 2))
    stages.append(Branches(convs(now, (192, 1, 1, 1), (320, 3, 3, 2)), convs(now, *sevens), nn.MaxPool2d(3, 2)))
    now += (320 + 192) // divisor
    for _ in range(2):
        fork, forks = forked(now, (384, 1, 1, 1)), forked(now, (448, 1, 1, 1), (384, 3, 3, 1))
        stages.append(Branches(convs(now, (320, 1, 1, 1)), fork, forks, pooled(now, 192)))
        now = 320 // divisor + 4 * (384 // divisor) + 192 // divisor
    return [*stages, Loss(now, batch)]


RESNETS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
    "resnet200": ((3, 24, 36, 3), True),
    "resnet1001": ((111, 111, 111), True),
}
DENSENETS = {
    "densenet121": ((6, 12, 24, 16), 32),
    "densenet161": ((6, 12, 36, 24), 48),
    "densenet169": ((6, 12, 32, 32), 32),
    "densenet201": ((6, 12, 48, 32), 32),
}
"""Blocks or layers of each group, and the kind of block or the growth."""

TRAINED = {
    "resnet18": (16, 64),
    "resnet34": (16, 32),
    "resnet50": (16, 32),
    "resnet101": (4, 32),
    "resnet152": (4, 32),
    "resnet200": (2, 32),
    "resnet1001": (1, 32),
    **dict.fromkeys(("densenet121", "densenet161", "densenet169", "densenet201"), (2, 32)),
    "inception": (2, 139),
}
"""Batches and image sizes of the networks that are narrow enough to train: ResNet1001 as it is, the DenseNets with a
growth of 16, the others a quarter as wide.
"""

PROFILED = {
    **dict.fromkeys(("resnet18", "resnet34"), (16, 224)),
    "resnet50": (8, 224),
    "resnet101": (1, 1000),
    **dict.fromkeys(("resnet152", "resnet200"), (4, 224)),
    **dict.fromkeys(("densenet121", "densenet161", "densenet169", "densenet201"), (4, 224)),
    "inception": (4, 299),
}
"""The same for the paper's networks as they are, whose stages are measured one at a time."""


def stages_of(name: str, batch: int, *, narrow: bool = False) -> list[nn.Module]:
    """The stages of a network as it is, for large images, or of one that is narrow enough to train.

    Raises:
        KeyError: no network has that name.
    """
    if name in RESNETS:
        return resnet(*RESNETS[name], 16 if narrow else 64, batch, large=not narrow)
    if name in DENSENETS:
        layers, growth = DENSENETS[name]
        return densenet(layers, 16 if narrow else growth, batch, large=not narrow)
    return {"inception": inception}[name](batch, 4 if narrow else 1)


def build(name: str, *, narrow: bool = True) -> tuple[str, list[nn.Module], torch.Tensor]:
    """A network to train, or one of the paper's as it is, as (batch × image, stages, input).

    Raises:
        KeyError: no network has that name.
    """
    batch, image = (TRAINED if narrow else PROFILED)[name]
    torch.manual_seed(0)
    return f"{batch} × {image}²", stages_of(name, batch, narrow=narrow), torch.randn(batch, 3, image, image)
