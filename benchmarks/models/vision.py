"""Vision models: convolutional networks, transformers, U-Nets and an autoencoder, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.subject import (
    CLASSES,
    Around,
    Denoised,
    Subject,
    architecture,
    classified,
    numbers,
    transformer,
)


def vision(title: str, kind: str, batch: int, side: int, blocks: tuple[str, ...] = (), **sizes: Any) -> Subject:
    """A classifier of transformers."""
    made = transformer(f"{kind}ForImageClassification", f"{kind}Config", num_labels=CLASSES, **sizes)
    return classified(title, made, batch, side, blocks)


@architecture("tiny")
def vgg(size: str) -> Subject:
    """Convolutions with BatchNorm, ReLUs in place and dropout before the head."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 16, 0, 32, 32, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(32, 10)]
    return classified("VGG", nn.Sequential(*layers, *head), 4, 32)


@architecture("tiny", "full", "large")
def resnet50(size: str) -> Subject:
    """Bottlenecks with BatchNorm; the tiny one has four blocks."""
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]} if size == "tiny" else {}
    shape = {"tiny": (4, 32), "full": (6, 112), "large": (12, 128)}[size]
    return vision("ResNet50", "ResNet", *shape, ("ResNetBottleNeckLayer",), **sizes)


@architecture("tiny")
def resnet_basic(size: str) -> Subject:
    """Basic blocks with BatchNorm."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return vision("ResNet, basic blocks", "ResNet", 4, 32, **sizes)


class Dense(nn.Module):
    """A convolution whose output is appended to its input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input and output, side by side."""
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


@architecture("tiny")
def densenet(size: str) -> Subject:
    """Every layer reads all before it."""
    blocks = [Dense(8 + 8 * i, 8) for i in range(4)]
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))
    return classified("DenseNet", nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *tail), 4, 32)


@architecture("tiny")
def mobilenet_v2(size: str) -> Subject:
    """Inverted bottlenecks with depthwise convolutions."""
    return vision("MobileNetV2", "MobileNetV2", 4, 32, image_size=32, depth_multiplier=0.25)


@architecture("tiny", "full")
def convnext(size: str) -> Subject:
    """Depthwise convolutions with layer norms, channels last inside the blocks; the tiny one drops whole paths."""
    widths, depths, shape = {
        "tiny": ([8, 16, 24, 32], [1, 1, 1, 1], (4, 32)),
        "full": ([48, 96, 192, 384], [2, 2, 6, 2], (8, 128)),
    }[size]
    drop = {"drop_path_rate": 0.1} if size == "tiny" else {}
    return vision("ConvNeXt", "ConvNext", *shape, ("ConvNextLayer",), hidden_sizes=widths, depths=depths, **drop)


@architecture("tiny")
def regnet(size: str) -> Subject:
    """Grouped convolutions."""
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8}
    return vision("RegNet", "RegNet", 4, 32, **sizes)


@architecture("tiny", "small", "full")
def vit(size: str) -> Subject:
    """A vision transformer; with dropout where it is tiny or small."""
    layers, width, heads, inner, batch, side = {
        "tiny": (2, 32, 2, 64, 4, 32),
        "small": (2, 192, 6, 768, 16, 64),
        "full": (8, 192, 3, 768, 8, 96),
    }[size]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": inner, "image_size": side, "patch_size": 8}
    drop = {} if size == "full" else {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return vision(f"ViT, {layers} layers", "ViT", batch, side, ("ViTLayer",), **sizes, **drop)


@architecture("tiny")
def swin(size: str) -> Subject:
    """A vision transformer over windows."""
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "window_size": 4}
    return vision("Swin", "Swin", 4, 32, **sizes, depths=[1, 1], num_heads=[2, 2])


@architecture("tiny", "full")
def unet(size: str) -> Subject:
    """A U-Net with skips, group norms and attention in its lower half."""
    from diffusers import UNet2DModel

    channels, side, batch, groups, layers = {
        "tiny": ((16, 32), 16, 2, 8, 1),
        "full": ((32, 64, 64), 48, 6, 16, 2),
    }[size]
    lower = len(channels) - 1
    made: Any = UNet2DModel
    inner = made(
        sample_size=side,
        layers_per_block=layers,
        block_out_channels=channels,
        norm_num_groups=groups,
        attention_head_dim=8,
        down_block_types=("DownBlock2D",) * lower + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * lower,
    )
    images = numbers(batch, 3, side, side)
    inputs = {"noisy": images, "when": torch.arange(batch) * 997 % 1000, "noise": images * 0.1}
    return Subject("U-Net", Denoised(inner), inputs, ("ResnetBlock2D", "Attention"))


class Rebuilt(Around):
    """An autoencoder with its loss."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The mean square error."""
        coder: Any = self.inner
        return F.mse_loss(coder.decode(coder.encode(images).latent_dist.mode()).sample, images)


@architecture("tiny")
def autoencoder(size: str) -> Subject:
    """A variational autoencoder's mean, decoded again."""
    from diffusers import AutoencoderKL

    made: Any = AutoencoderKL
    inner = made(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        layers_per_block=1,
    )
    return Subject("autoencoder", Rebuilt(inner), {"images": numbers(2, 3, 16, 16)})


class Mixer(nn.Module):
    """Patches mixed over positions and over channels in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 8, stride=8)
        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        for i, mix in enumerate(self.mix):
            y = self.norm(x)
            x = x + (mix(y) if i % 2 else mix(y.transpose(1, 2)).transpose(1, 2))
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


@architecture("tiny")
def mlp_mixer(size: str) -> Subject:
    """Perceptrons only."""
    return classified("MLP-Mixer", Mixer(), 4, 32)
