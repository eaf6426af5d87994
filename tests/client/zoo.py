"""Real architectures from configurations, tiny, with random weights: at least one of each kind that people train."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from client.small_models import Case, numbers

ZOO: dict[str, Callable[[], Case]] = {}
VOCABULARY = 120


def model(make: Callable[[], Case]) -> Callable[[], Case]:
    ZOO[make.__name__] = make
    return make


def build(name: str) -> Case:
    """A model of the zoo in train mode, the same each time."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = ZOO[name]()
    case.module.train()
    return case


def tokens(batch: int = 4, length: int = 24) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def language(kind: str, config: str, **sizes: Any) -> Case:
    import transformers

    made = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    return Case(made, (), {"input_ids": tokens(), "labels": tokens()}, None)


class Classified(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.inner(pixels)
        return F.cross_entropy(getattr(found, "logits", found), labels)


def vision(inner: nn.Module, side: int = 32, batch: int = 4) -> Case:
    return Case(Classified(inner), (numbers(batch, 3, side, side), torch.arange(batch) % 10), {}, None)


def transformers_vision(kind: str, config: str, side: int = 32, **sizes: Any) -> Case:
    import transformers

    return vision(getattr(transformers, kind)(getattr(transformers, config)(num_labels=10, **sizes)), side)


@model
def vgg() -> Case:
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 16, 0, 32, 32, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(32, 10)]
    return vision(nn.Sequential(*layers, *head))


@model
def resnet_bottleneck() -> Case:
    return transformers_vision(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]
    )


@model
def resnet_basic() -> Case:
    return transformers_vision(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
    )


@model
def densenet() -> Case:
    class Dense(nn.Module):
        def __init__(self, channels: int, growth: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)

    blocks = [Dense(8 + 8 * i, 8) for i in range(4)]
    return vision(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))
    )


@model
def mobilenet_v2() -> Case:
    return transformers_vision(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", image_size=32, depth_multiplier=0.25
    )


@model
def convnext() -> Case:
    return transformers_vision(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.1,
    )


@model
def regnet() -> Case:
    return transformers_vision(
        "RegNetForImageClassification",
        "RegNetConfig",
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        groups_width=8,
    )


@model
def vision_transformer() -> Case:
    return transformers_vision(
        "ViTForImageClassification",
        "ViTConfig",
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )


@model
def swin() -> Case:
    return transformers_vision(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    )


@model
def unet() -> Case:
    from diffusers import UNet2DModel

    class Denoised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = UNet2DModel(
                sample_size=16,
                layers_per_block=1,
                block_out_channels=(16, 32),
                norm_num_groups=8,
                attention_head_dim=8,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            )

        def forward(self, noisy: torch.Tensor, when: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.inner(noisy, when).sample, noise)

    images = numbers(2, 3, 16, 16)
    return Case(Denoised(), (images, torch.tensor([3, 500]), images * 0.1), {}, None)


@model
def autoencoder() -> Case:
    from diffusers import AutoencoderKL

    class Rebuilt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = AutoencoderKL(
                block_out_channels=(8, 16),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                norm_num_groups=4,
                layers_per_block=1,
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            latent = self.inner.encode(images).latent_dist.mode()
            return F.mse_loss(self.inner.decode(latent).sample, images)

    return Case(Rebuilt(), (numbers(2, 3, 16, 16),), {}, None)


@model
def bert() -> Case:
    return language(
        "BertForMaskedLM",
        "BertConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )


@model
def distilbert() -> Case:
    return language(
        "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=2, hidden_dim=64
    )


@model
def albert() -> Case:
    return language(
        "AlbertForMaskedLM",
        "AlbertConfig",
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        attention_probs_dropout_prob=0.1,
        hidden_dropout_prob=0.1,
    )


@model
def gpt2() -> Case:
    return language(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )


@model
def gpt_neox() -> Case:
    return language(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        use_cache=False,
    )


@model
def llama() -> Case:
    return language(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        use_cache=False,
    )


@model
def qwen2() -> Case:
    return language(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        use_cache=False,
        tie_word_embeddings=True,
    )


@model
def opt() -> Case:
    return language(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
        use_cache=False,
    )


@model
def t5() -> Case:
    return language(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )


@model
def bart() -> Case:
    return language(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        use_cache=False,
    )


@model
def mlp_mixer() -> Case:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 8, stride=8)
            self.mix = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            x = self.patch(pixels).flatten(2).transpose(1, 2)
            for i, mix in enumerate(self.mix):
                y = self.norm(x)
                x = x + (mix(y) if i % 2 else mix(y.transpose(1, 2)).transpose(1, 2))
            return self.head(x.mean(1))

    return vision(Mixer())


@model
def dense_mixture_of_experts() -> Case:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gate = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 4)
            self.up, self.down = nn.Parameter(numbers(4, 32, 64) * 0.1), nn.Parameter(numbers(4, 64, 32) * 0.1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids).flatten(0, 1)
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            share = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights)
            outs = torch.einsum("neh,ehd->ned", F.silu(torch.einsum("nd,edh->neh", x, self.up)), self.down)
            return F.cross_entropy((outs * share.unsqueeze(-1)).sum(1) @ self.embed.weight.t(), ids.flatten())

    return Case(Experts(), (tokens(32),), {}, None)
