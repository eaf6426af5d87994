"""Architectures of transformers from shrunken configurations, with random weights; nothing is fetched."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .compare import Sample

VOCABULARY, WIDTH, SIDE = 120, 32, 32

CAUSAL = (
    "apertus arcee bart bert biogpt bitnet bloom codegen cohere cohere2 ctrl data2vec-text diffllama doge electra "
    "ernie ernie4_5 exaone4 falcon gemma gemma2 glm glm4 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj "
    "granite granitemoe helium hunyuan_v1_dense jetmoe llama mamba mistral mixtral mpt nemotron olmo olmo2 olmo3 "
    "olmoe openai-gpt opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe roberta roformer seed_oss smollm3 "
    "stablelm starcoder2 xglm xlm xlnet"
)
MASKED = (
    "albert camembert convbert deberta deberta-v2 distilbert flaubert fnet funnel ibert layoutlm longformer "
    "megatron-bert mobilebert modernbert mpnet mra nystromformer rembert squeezebert yoso"
)
IMAGES = (
    "beit convnext convnextv2 dinov2 focalnet ijepa mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt regnet "
    "resnet segformer swin vit vit_msn"
)
PAIRS = "blenderbot blenderbot-small m2m_100 marian mbart mt5 mvp pegasus plbart prophetnet t5 umt5"

SIZES = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": 10,
    "image_size": SIDE,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_size": WIDTH,
    "vocab_size_per_layer_input": VOCABULARY,
}
WIDTHS = "hidden_size d_model n_embd dim embed_dim emb_dim d_embed word_embed_proj_dim hidden_dim"
INNER = (
    "intermediate_size ffn_dim d_ff d_inner n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim dff "
    "moe_intermediate_size shared_expert_intermediate_size ffn_size mlp_dim"
)
LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers layers num_blocks"
)
HEADS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads"
)
KEY_VALUE_HEADS = "num_key_value_heads num_kv_heads"
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "convnext": {**STAGES, "patch_size": 4},
    "convnextv2": {**STAGES, "patch_size": 4},
    "focalnet": {"embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3], "patch_size": 4},
    "gptj": {"rotary_dim": 8},
    "poolformer": STAGES,
    "pvt": {**STAGES, "num_attention_heads": [1, 2, 2, 4], "patch_size": 4},
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 4},
    "resnet": {**STAGES, "embedding_size": 8},
    "segformer": {**STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
}
"""What the general sizes do not reach."""

HEAD_WIDTHS = "head_dim d_kv d_head attention_head_size kv_channels"


def shrunken(config: type) -> Any:
    """A configuration of this class with small sizes wherever its names are the usual ones."""
    known = config().to_dict()
    wanted: dict[str, Any] = dict(SIZES)
    for names, size in (
        (WIDTHS, WIDTH),
        (INNER, 2 * WIDTH),
        (LAYERS, 1),
        (HEADS, 4),
        (KEY_VALUE_HEADS, 2),
        (HEAD_WIDTHS, 8),
    ):
        wanted |= dict.fromkeys(names.split(), size)
    given = {n: v for n, v in wanted.items() if n in known and (known[n] is None or isinstance(known[n], int))}
    given |= {n: False for n in ("use_cache",) if n in known or n in inspect.signature(config).parameters}
    if isinstance(known.get("layer_types"), list):
        given["layer_types"] = known["layer_types"][:1]
    return config(**{**given, **SPECIAL.get(config.model_type, {})})


def architecture_samples() -> Iterator[Sample]:
    """One training call of each architecture that its shrunken configuration builds."""
    for names, build in ((CAUSAL, _causal), (MASKED, _masked), (IMAGES, _image), (PAIRS, _pair)):
        for name in names.split():
            yield Sample(name, partial(build, name))


Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _built(auto: str, name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = shrunken(transformers.CONFIG_MAPPING[name])
    config.decoder_start_token_id = SIZES["decoder_start_token_id"]
    made: nn.Module = getattr(transformers, auto).from_config(config)
    return made.train()


def _tokens(seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))


def _causal(name: str) -> Made:
    return _built("AutoModelForCausalLM", name), (), {"input_ids": _tokens(), "labels": _tokens()}


def _masked(name: str) -> Made:
    return _built("AutoModelForMaskedLM", name), (), {"input_ids": _tokens(), "labels": _tokens()}


def _pair(name: str) -> Made:
    return _built("AutoModelForSeq2SeqLM", name), (), {"input_ids": _tokens(), "labels": _tokens(4)}


def _image(name: str) -> Made:
    pixels = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    made: Any = _built("AutoModelForImageClassification", name)
    made.config.problem_type = "single_label_classification"  # else the first call sets it, which no graph repeats
    return made, (), {"pixel_values": pixels, "labels": torch.arange(2)}
