"""The models of the Inductor benchmark: each with dropout, each with its blocks under checkpoints when asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def _language(kind: str, config: str, batch: int, length: int, checkpointed: bool, **sizes: Any) -> Made:
    import transformers

    transformers.logging.set_verbosity_error()
    made = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=512, **sizes)).train()
    if made.loss_type is None:  # the name of the class says none, and the warning of it would break the graph
        made.loss_type = "ForCausalLM"
    if checkpointed:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.randint(3, 512, (batch, length), generator=torch.Generator().manual_seed(3))
    return _Loss(made), {"input_ids": tokens, "labels": tokens}


class _Loss(nn.Module):
    """Only the loss leaves the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(**batch).loss
        return loss


def gpt2(checkpointed: bool) -> Made:
    """GPT-2: 2 layers of 192, 6 heads, 8 sequences of 128 tokens, dropout 0.1."""
    sizes = {"n_positions": 128, "n_embd": 192, "n_layer": 2, "n_head": 6, "use_cache": False}
    return _language("GPT2LMHeadModel", "GPT2Config", 8, 128, checkpointed, **sizes, bos_token_id=0, eos_token_id=1)


def bert(checkpointed: bool) -> Made:
    """BERT: 2 layers of 192, 6 heads, 8 sequences of 128 tokens, dropout 0.1."""
    sizes = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 768}
    return _language("BertForMaskedLM", "BertConfig", 8, 128, checkpointed, **sizes, max_position_embeddings=128)


def vit(checkpointed: bool) -> Made:
    """ViT: 2 layers of 192, 6 heads, 16 images of 64x64 in patches of 8, dropout 0.1."""
    import transformers

    config = transformers.ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=768,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    made = transformers.ViTForImageClassification(config).train()
    if checkpointed:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _Classified(made), {"pixels": _images(16, 64), "labels": torch.arange(16) % 2}


class _Classified(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.inner(pixels)
        return F.cross_entropy(getattr(found, "logits", found), labels)


def _images(batch: int, side: int) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(3))


class _Residual(nn.Module):
    """Two convolutions with batch statistics, dropout between them, and the way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)])
        self.drop = nn.Dropout(0.1)
        self.around = nn.Conv2d(inner, outer, 1, stride) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(torch.relu(self.norms[0](self.one(x))))
        return torch.relu(self.norms[1](self.two(y)) + self.around(x))


class _ResNet(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Conv2d(3, 24, 3, 1, 1)
        widths = [24, 24, 24, 48, 48, 96, 96]
        pairs = itertools.pairwise(widths)
        self.blocks = nn.ModuleList(_Residual(a, b, 1 if a == b else 2) for a, b in pairs)
        self.head = nn.Linear(96, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.first(pixels)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def resnet(checkpointed: bool) -> Made:
    """A residual network: 6 blocks of 24 to 96 channels with batch statistics, 16 images of 48x48, dropout 0.1."""
    return _Classified(_ResNet(checkpointed)), {"pixels": _images(16, 48), "labels": torch.arange(16) % 10}


class _Double(nn.Module):
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
        made: torch.Tensor = self.body(x)
        return made


class _UNet(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        widths = (16, 32)
        self.down = nn.ModuleList(_Double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = _Double(32, 32)
        self.up = nn.ModuleList(_Double(a + b, b) for a, b in ((32, 32), (32, 16)))
        self.last = nn.Conv2d(16, 3, 1)

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return made

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x, kept = pixels, []
        for block in self.down:
            x = self._run(block, x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self._run(self.middle, x)
        for block in self.up:
            x = self._run(block, torch.cat((F.interpolate(x, scale_factor=2.0), kept.pop()), 1))
        return F.mse_loss(self.last(x), pixels)


def unet(checkpointed: bool) -> Made:
    """A U-Net: two levels of 16 and 32 channels and a middle, group statistics, 8 images of 64x64, dropout 0.1."""
    return _UNet(checkpointed), {"pixels": _images(8, 64)}


MODELS: dict[str, Callable[[bool], Made]] = {"gpt2": gpt2, "bert": bert, "vit": vit, "resnet": resnet, "unet": unet}


def build(name: str, checkpointed: bool = False) -> Made:
    """A model and one batch, the same each time."""
    torch.manual_seed(0)
    return MODELS[name](checkpointed)
