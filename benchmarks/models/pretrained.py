"""The models of the client's benchmark: transformers and diffusers configs, random weights, activations the most of it.

Sized so that one plain step takes some 100 to 500 ms on one core and needs 100 to 400 MiB beyond parameters and inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SEED = 11


@dataclass(frozen=True)
class Subject:
    """A model to train on one batch.

    Attributes:
        title: for tables.
        model: in train mode; its output holds the loss.
        blocks: the names of the classes that people checkpoint, one call each.
    """

    title: str
    model: nn.Module
    inputs: Mapping[str, torch.Tensor]
    blocks: tuple[str, ...]

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a copy of the model, outermost first, none inside another."""
        found: list[nn.Module] = []
        inside: set[int] = set()
        for part in model.modules():
            if type(part).__name__ in self.blocks and id(part) not in inside:
                found.append(part)
                inside.update(id(child) for child in part.modules())
        return found


MODELS: dict[str, Callable[[bool], Subject]] = {}


def model(make: Callable[[bool], Subject]) -> Callable[[bool], Subject]:
    """Enter a model under its function's name."""
    MODELS[make.__name__] = make
    return make


def build(name: str, tiny: bool = False) -> Subject:
    """A model with the same weights and batch each time; `tiny` makes one whose step takes milliseconds."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = MODELS[name](tiny)
    subject.model.train()
    return subject


def _tokens(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def _images(batch: int, side: int) -> dict[str, torch.Tensor]:
    return {"pixels": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 10, (batch,))}


def _language(title: str, kind: str, config: str, blocks: tuple[str, ...], tiny: bool, **sizes: Any) -> Subject:
    import transformers

    vocabulary = 128 if tiny else 2048
    made = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=vocabulary, **sizes))
    return Subject(title, made, _tokens(*((2, 16) if tiny else (8, 128)), vocabulary), blocks)


class Classified(nn.Module):
    """A classifier with its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy."""
        return F.cross_entropy(self.inner(pixels).logits, labels)


class Denoised(nn.Module):
    """A noise predictor with its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, noisy: torch.Tensor, when: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The mean square error."""
        return F.mse_loss(self.inner(noisy, when).sample, noise)


def _vision(
    title: str, kind: str, config: str, blocks: tuple[str, ...], batch: int, side: int, **sizes: Any
) -> Subject:
    import transformers

    inner = getattr(transformers, kind)(getattr(transformers, config)(num_labels=10, **sizes))
    return Subject(title, Classified(inner), _images(batch, side), blocks)


@model
def gpt2(tiny: bool) -> Subject:
    """A decoder with dropout and tied embeddings."""
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2} if tiny else {"n_layer": 6, "n_embd": 256, "n_head": 8}
    more = {"n_positions": 128, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "loss_type": "ForCausalLM"}
    return _language("GPT-2, 6 layers", "GPT2LMHeadModel", "GPT2Config", ("GPT2Block",), tiny, **sizes, **more)


@model
def bert(tiny: bool) -> Subject:
    """An encoder with dropout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if not tiny:
        sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1024}
    return _language("BERT, 6 layers", "BertForMaskedLM", "BertConfig", ("BertLayer",), tiny, **sizes)


@model
def llama(tiny: bool) -> Subject:
    """A decoder with rotary positions, grouped queries and gated units, without dropout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    if not tiny:
        sizes = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 704}
    more = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
    return _language(
        "Llama, 6 layers", "LlamaForCausalLM", "LlamaConfig", ("LlamaDecoderLayer",), tiny, **sizes, **more
    )


@model
def t5(tiny: bool) -> Subject:
    """An encoder and a decoder with cross-attention and relative positions."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    if not tiny:
        sizes = {"d_model": 192, "d_kv": 32, "d_ff": 768, "num_layers": 3, "num_heads": 6}
    more = {"decoder_start_token_id": 0, "use_cache": False}
    return _language("T5, 3 + 3 layers", "T5ForConditionalGeneration", "T5Config", ("T5Block",), tiny, **sizes, **more)


@model
def vit(tiny: bool) -> Subject:
    """A vision transformer without dropout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if not tiny:
        sizes = {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 3, "intermediate_size": 768}
    side, batch = (32, 2) if tiny else (96, 8)
    return _vision(
        "ViT, 8 layers",
        "ViTForImageClassification",
        "ViTConfig",
        ("ViTLayer",),
        batch,
        side,
        image_size=side,
        patch_size=8,
        **sizes,
    )


@model
def resnet50(tiny: bool) -> Subject:
    """Residual convolutions with BatchNorm."""
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]} if tiny else {}
    return _vision(
        "ResNet50",
        "ResNetForImageClassification",
        "ResNetConfig",
        ("ResNetBottleNeckLayer",),
        *((2, 32) if tiny else (6, 112)),
        **sizes,
    )


@model
def convnext(tiny: bool) -> Subject:
    """Depthwise convolutions with layer norms, channels last inside the blocks."""
    sizes: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
    if not tiny:
        sizes = {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 6, 2]}
    return _vision(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        ("ConvNextLayer",),
        *((2, 32) if tiny else (8, 128)),
        **sizes,
    )


@model
def unet(tiny: bool) -> Subject:
    """A U-Net with skips, group norms and attention in its lower half."""
    from diffusers import UNet2DModel

    channels, side, batch, groups = ((16, 32), 16, 2, 8) if tiny else ((32, 64, 64), 48, 6, 16)
    lower = len(channels) - 1
    unet: Any = UNet2DModel
    inner = unet(
        sample_size=side,
        layers_per_block=1 if tiny else 2,
        block_out_channels=channels,
        norm_num_groups=groups,
        attention_head_dim=8,
        down_block_types=("DownBlock2D",) * lower + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * lower,
    )
    images = torch.randn(batch, 3, side, side)
    inputs = {"noisy": images, "when": torch.randint(0, 1000, (batch,)), "noise": torch.randn_like(images)}
    blocks = ("ResnetBlock2D", "Attention")
    return Subject("U-Net", Denoised(inner), inputs, blocks)
