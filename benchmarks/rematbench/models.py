"""Thirty-odd architectures at the sizes that people train them, without weights, and the graphs of their steps.

Each is a call that gives its loss. Configurations are those of published checkpoints, written out; what torchvision or
timm have is written anew.

A model is traced with fake tensors of a device that need not be there (`remat.target`). Its kernels cost whole
nanoseconds by the roofline of `remat.target.price`: the longer of arithmetic and traffic by the data sheet, times the
share that its class of kernels achieves, and a launch. Fixed bytes are parameters, buffers and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.subject import Around, transformer
from benchmarks.models.vision import Rebuilt
from remat.device import NAMED
from remat.target.build import build, tracing_for
from remat.target.devices import target_of
from remat.target.price import price
from remat.training.step import training_step
from remat_ir import Graph

Made = tuple[Any, ...]
HALF = torch.bfloat16


class Model(NamedTuple):
    """A model to capture: what it is, the device that it is priced for, and the function that makes it and its call."""

    title: str
    device: str
    make: Callable[[], Made]


MODELS: dict[str, Model] = {}


def model(title: str, device: str = "h100") -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Enter a model under its function's name."""

    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        MODELS[make.__name__.replace("_", "-")] = Model(title, device, make)
        return make

    return enter


def captured(name: str, grouped: bool) -> Graph:
    """A model's training step as a graph: of whole kernels, or of cheap ones merged into their neighbours.

    Raises:
        CaptureError: it cannot be captured as one graph.
        InvalidData: the model cannot be built without values.
    """
    model = MODELS[name]
    target = target_of(model.device)
    with tracing_for(NAMED, target.capability):
        built = build(model.make, NAMED)
        step = training_step(
            built.model,
            built.args,
            built.kwargs,
            grouped=grouped,
            price=lambda kernels: price(kernels, target, None).profiled,
        )
    return replace(step.graph, op_names=None, value_names=None)


def _tokens(*shape: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(*shape, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, side: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(batch, 3, side, side, dtype=dtype)


def _causal(kind: str, batch: int, length: int, **sizes: Any) -> Made:
    made = transformer(f"{kind}ForCausalLM", f"{kind}Config", use_cache=False, **sizes)
    return made.to(HALF), (), _tokens(batch, length)


class Classifier(Around):
    """A network that makes logits, with its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy."""
        found = self.inner(x)
        return F.cross_entropy(getattr(found, "logits", found).float(), labels)


class Denoiser(Around):
    """A network that predicts noise, with its loss."""

    def forward(self, noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The mean square error."""
        return F.mse_loss(self.inner(*args, return_dict=False, **kwargs)[0].float(), noise.float())


def _vision(kind: str, batch: int, side: int, **sizes: Any) -> Made:
    made = transformer(f"{kind}ForImageClassification", f"{kind}Config", num_labels=1000, **sizes)
    return Classifier(made.to(HALF)), (_images(batch, side), torch.zeros(batch, dtype=torch.long))


# --- language


@model("GPT-2 medium, 8 × 1,024 tokens")
def gpt2_medium() -> Made:
    sizes = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "use_cache": False, "loss_type": "ForCausalLM"}
    return transformer("GPT2LMHeadModel", "GPT2Config", **sizes).to(HALF), (), _tokens(8, 1024)


@model("Llama 3.2 1B, 2 × 2,048 tokens")
def llama3_1b() -> Made:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    return _causal("Llama", 2, 2048, **sizes, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True)


@model("Llama 3 8B, 1 × 4,096 tokens")
def llama3_8b() -> Made:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return _causal("Llama", 1, 4096, **sizes, num_key_value_heads=8, vocab_size=128256)


@model("Qwen 2.5 0.5B, 4 × 2,048 tokens")
def qwen2_half_b() -> Made:
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    return _causal("Qwen2", 4, 2048, **sizes, num_key_value_heads=2, tie_word_embeddings=True)


@model("Qwen 3 1.7B, 2 × 2,048 tokens")
def qwen3_2b() -> Made:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    return _causal("Qwen3", 2, 2048, **sizes, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)


@model("Gemma 2 2B, 2 × 2,048 tokens")
def gemma2_2b() -> Made:
    sizes = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    return _causal("Gemma2", 2, 2048, **sizes, num_key_value_heads=4, head_dim=256)


@model("Phi 3 mini, 1 × 2,048 tokens")
def phi3_mini() -> Made:
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32}
    return _causal("Phi3", 1, 2048, **sizes, pad_token_id=0)


@model("OPT 1.3B, 4 × 1,024 tokens")
def opt_1b() -> Made:
    sizes = {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
    return _causal("OPT", 4, 1024, **sizes)


@model("GPT-NeoX (Pythia 1.4B), 4 × 1,024 tokens")
def pythia_1b() -> Made:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
    return _causal("GPTNeoX", 4, 1024, **sizes)


@model("Mixtral's shape with 8 experts in 8 layers, 2 × 1,024 tokens")
def mixtral_small() -> Made:
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16}
    return _causal("Mixtral", 2, 1024, **sizes, num_key_value_heads=4, num_local_experts=8)


@model("OLMoE's shape in 8 layers, 2 × 1,024 tokens")
def olmoe_small() -> Made:
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16}
    return _causal("Olmoe", 2, 1024, **sizes, num_experts=16, num_experts_per_tok=4)


@model("Mamba-2 370M, 2 × 1,024 tokens")
def mamba2_370m() -> Made:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 48, "state_size": 128, "num_heads": 32, "head_dim": 64}
    return _causal("Mamba2", 2, 1024, **sizes, n_groups=1)


@model("BERT large, 16 × 512 tokens")
def bert_large() -> Made:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return transformer("BertForMaskedLM", "BertConfig", **sizes).to(HALF), (), _tokens(16, 512)


@model("DeBERTa v2 base, 8 × 512 tokens")
def deberta_base() -> Made:
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    return transformer("DebertaV2ForMaskedLM", "DebertaV2Config", **sizes).to(HALF), (), _tokens(8, 512)


@model("ModernBERT base, 8 × 1,024 tokens")
def modernbert_base() -> Made:
    made = transformer("ModernBertForMaskedLM", "ModernBertConfig", reference_compile=False)
    return made.to(HALF), (), _tokens(8, 1024) | {"attention_mask": torch.ones(8, 1024).long()}


@model("T5 large, 4 × 512 tokens")
def t5_large() -> Made:
    sizes = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    made = transformer("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0, use_cache=False)
    return made.to(HALF), (), _tokens(4, 512)


@model("BART large, 4 × 512 tokens")
def bart_large() -> Made:
    made = transformer("BartForConditionalGeneration", "BartConfig", use_cache=False, decoder_start_token_id=0)
    return made.to(HALF), (), _tokens(4, 512)


# --- speech and audio


@model("Whisper small, 4 × 30 s")
def whisper_small() -> Made:
    made = transformer(
        "WhisperForConditionalGeneration", "WhisperConfig", d_model=768, encoder_layers=12, decoder_layers=12,
        encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    features = torch.zeros(4, 80, 3000, dtype=HALF)
    return made.to(HALF), (), {"input_features": features, "labels": torch.zeros(4, 256, dtype=torch.long)}


@model("Audio Spectrogram Transformer, 8 × 10 s")
def ast_base() -> Made:
    made = transformer("ASTForAudioClassification", "ASTConfig", num_labels=527)
    return Classifier(made.to(HALF)), (torch.zeros(8, 1024, 128, dtype=HALF), torch.zeros(8, dtype=torch.long))


# --- vision


@model("ViT-L/16, 32 images of 224²")
def vit_large() -> Made:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return _vision("ViT", 32, 224, **sizes)


@model("DeiT-B/16, 64 images of 224²")
def deit_base() -> Made:
    return _vision("DeiT", 64, 224)


@model("Swin-B, 32 images of 224²")
def swin_base() -> Made:
    return _vision("Swin", 32, 224, embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])


@model("ConvNeXt-B, 32 images of 224²")
def convnext_base() -> Made:
    return _vision("ConvNext", 32, 224, depths=[3, 3, 27, 3], hidden_sizes=[128, 256, 512, 1024])


@model("ResNet-50, 64 images of 224²")
def resnet50() -> Made:
    return _vision("ResNet", 64, 224)


@model("ResNet-152, 32 images of 224²")
def resnet152() -> Made:
    return _vision("ResNet", 32, 224, depths=[3, 8, 36, 3])


@model("RegNet-Y 16 GF, 32 images of 224²")
def regnet_y() -> Made:
    return _vision("RegNet", 32, 224, depths=[2, 4, 11, 1], hidden_sizes=[224, 448, 1232, 3024], groups_width=112)


@model("MobileNetV2, 64 images of 224²", "a100")
def mobilenet_v2() -> Made:
    return _vision("MobileNetV2", 64, 224)


@model("EfficientNet-B4, 16 images of 380²", "a100")
def efficientnet_b4() -> Made:
    return _vision(
        "EfficientNet", 16, 380, width_coefficient=1.4, depth_coefficient=1.8, image_size=380, hidden_dim=1792
    )


@model("SegFormer-B2, 8 images of 512²")
def segformer_b2() -> Made:
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768, "num_labels": 150}
    made = transformer("SegformerForSemanticSegmentation", "SegformerConfig", **sizes).to(HALF)
    maybe_install_capturing_hooks(made)  # its first call would take a lock for that, which ends a graph
    return made, (), {"pixel_values": _images(8, 512), "labels": torch.zeros(8, 512, 512, dtype=torch.long)}


class Detector(Around):
    """DETR's network with a loss over all its outputs; matching boxes is not part of the graph."""

    def forward(self, images: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the classes and the distance of the boxes."""
        found = self.inner(images)
        cross = F.cross_entropy(found.logits.flatten(0, 1).float(), classes.flatten())
        return cross + F.l1_loss(found.pred_boxes.float(), boxes)


@model("YOLOS-S, 4 images of 512 × 864", "a100")
def yolos_small() -> Made:
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "image_size": [512, 864]}
    made = transformer("YolosForObjectDetection", "YolosConfig", **sizes, num_labels=91)
    images = torch.zeros(4, 3, 512, 864, dtype=HALF)
    return Detector(made.to(HALF)), (images, torch.zeros(4, 100, dtype=torch.long), torch.zeros(4, 100, 4))


class Graphed(nn.Module):
    """Graph convolutions (Kipf and Welling, 2017) with residuals, over edges that are given as pairs."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, width), nn.Linear(width, classes)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the nodes."""
        x = self.first(nodes)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            y = linear(F.relu(norm(x)))
            x = x + torch.zeros_like(y).index_add(0, edges[1], y.index_select(0, edges[0]))
        return F.cross_entropy(self.last(x), labels)


@model("a deep graph convolution network, 28 layers, 169,343 nodes, 1,166,243 edges", "a100")
def gcn_arxiv() -> Made:
    edges = torch.zeros(2, 1_166_243, dtype=torch.long)
    nodes = torch.zeros(169_343, 128)
    return Graphed(128, 28, 40), (nodes, edges, torch.zeros(169_343, dtype=torch.long))


# --- diffusion


@model("the U-Net of Stable Diffusion 1.5, 4 latents of 64²")
def sd15_unet() -> Made:
    from diffusers import UNet2DConditionModel

    made: Any = UNet2DConditionModel
    inner = made(sample_size=64, cross_attention_dim=768).to(HALF)
    latents, text = torch.zeros(4, 4, 64, 64, dtype=HALF), torch.zeros(4, 77, 768, dtype=HALF)
    return Denoiser(inner), (latents, latents, torch.zeros(4, dtype=torch.long), text)


@model("DDPM's U-Net, 8 images of 128²")
def ddpm_unet() -> Made:
    from diffusers import UNet2DModel

    made: Any = UNet2DModel
    inner = made(
        sample_size=128, block_out_channels=(128, 128, 256, 256, 512, 512), layers_per_block=2,
        down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    ).to(HALF)  # fmt: skip
    images = _images(8, 128)
    return Denoiser(inner), (images, images, torch.zeros(8, dtype=torch.long))


@model("DiT-XL/2, 16 latents of 32²")
def dit_xl() -> Made:
    from diffusers import DiTTransformer2DModel

    made: Any = DiTTransformer2DModel
    inner = made(num_attention_heads=16, attention_head_dim=72, num_layers=28, sample_size=32, out_channels=4).to(HALF)
    latents, labels = torch.zeros(16, 4, 32, 32, dtype=HALF), torch.zeros(16, dtype=torch.long)
    return Denoiser(inner), (latents, latents), {"timestep": labels, "class_labels": labels}


@model("PixArt-α's transformer, 8 latents of 64²")
def pixart() -> Made:
    from diffusers import PixArtTransformer2DModel

    made: Any = PixArtTransformer2DModel
    inner = made(sample_size=64, out_channels=4, norm_type="ada_norm_single", caption_channels=4096).to(HALF)
    latents, text = torch.zeros(8, 4, 64, 64, dtype=HALF), torch.zeros(8, 120, 4096, dtype=HALF)
    more = {"encoder_hidden_states": text, "timestep": torch.zeros(8, dtype=torch.long)}
    return Denoiser(inner), (latents, latents), more


@model("Stable Diffusion's autoencoder, 2 images of 256²")
def sd_vae() -> Made:
    from diffusers import AutoencoderKL

    made: Any = AutoencoderKL
    inner = made(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    ).to(HALF)  # fmt: skip
    return Rebuilt(inner), (_images(2, 256),)
