"""Language models: encoders, decoders, both, and a mixture of experts, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.subject import Subject, architecture, numbers, tokens, transformer

VOCABULARY = {"tiny": 120, "small": 512, "full": 2048}
BATCH = {"tiny": (4, 24), "small": (8, 128), "full": (8, 128)}
"""Sequences and tokens of each."""


def language(title: str, kind: str, config: str, size: str, blocks: tuple[str, ...] = (), **sizes: Any) -> Subject:
    """A model that is trained on its own tokens."""
    ids = tokens(VOCABULARY[size], *BATCH[size])
    made = transformer(kind, config, vocab_size=VOCABULARY[size], **sizes)
    return Subject(title, made, {"input_ids": ids, "labels": ids}, blocks)


@architecture("tiny", "small", "full")
def gpt2(size: str) -> Subject:
    """A decoder with dropout and tied embeddings."""
    layers, width, heads = {"tiny": (2, 32, 2), "small": (2, 192, 6), "full": (6, 256, 8)}[size]
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": BATCH[size][1]}
    more = {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False, "loss_type": "ForCausalLM"}
    title = f"GPT-2, {layers} layers"
    return language(title, "GPT2LMHeadModel", "GPT2Config", size, ("GPT2Block",), **sizes, **more)


@architecture("tiny", "small", "full")
def bert(size: str) -> Subject:
    """An encoder with dropout."""
    layers, width, heads, inner = {"tiny": (2, 32, 2, 64), "small": (2, 192, 6, 768), "full": (6, 256, 8, 1024)}[size]
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    title = f"BERT, {layers} layers"
    return language(title, "BertForMaskedLM", "BertConfig", size, ("BertLayer",), **sizes, intermediate_size=inner)


@architecture("tiny")
def distilbert(size: str) -> Subject:
    """A smaller encoder."""
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    return language("DistilBERT", "DistilBertForMaskedLM", "DistilBertConfig", size, **sizes)


@architecture("tiny")
def albert(size: str) -> Subject:
    """An encoder whose layers share their weights."""
    sizes = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    more = {"intermediate_size": 64, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
    return language("ALBERT", "AlbertForMaskedLM", "AlbertConfig", size, **sizes, **more)


@architecture("tiny")
def gpt_neox(size: str) -> Subject:
    """A decoder whose attention and feed-forward layers are parallel."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return language("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", size, **sizes, use_cache=False)


@architecture("tiny", "full")
def llama(size: str) -> Subject:
    """A decoder with rotary positions, grouped queries and gated units, without dropout."""
    layers, width, inner = {"tiny": (2, 32, 64), "full": (6, 256, 704)}[size]
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner}
    more = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
    title = f"Llama, {layers} layers"
    return language(title, "LlamaForCausalLM", "LlamaConfig", size, ("LlamaDecoderLayer",), **sizes, **more)


@architecture("tiny")
def qwen2(size: str) -> Subject:
    """A decoder with tied embeddings and grouped queries."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 64, "use_cache": False, "tie_word_embeddings": True}
    return language("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", size, **sizes, **more)


@architecture("tiny")
def opt(size: str) -> Subject:
    """A decoder with learned positions."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}
    more = {"word_embed_proj_dim": 32, "max_position_embeddings": 64, "use_cache": False}
    return language("OPT", "OPTForCausalLM", "OPTConfig", size, **sizes, **more)


@architecture("tiny", "full")
def t5(size: str) -> Subject:
    """An encoder and a decoder with cross-attention and relative positions."""
    layers, width, key, inner, heads = {"tiny": (2, 32, 16, 64, 2), "full": (3, 192, 32, 768, 6)}[size]
    sizes = {"d_model": width, "d_kv": key, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    more = {"decoder_start_token_id": 0, "use_cache": False}
    title = f"T5, {layers} + {layers} layers"
    return language(title, "T5ForConditionalGeneration", "T5Config", size, ("T5Block",), **sizes, **more)


@architecture("tiny")
def bart(size: str) -> Subject:
    """An encoder and a decoder with learned positions."""
    sizes = {"d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 0, "use_cache": False}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 64}
    return language("BART", "BartForConditionalGeneration", "BartConfig", size, **sizes)


class Experts(nn.Module):
    """Every expert runs on every token; two of four count."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(vocabulary, 32), nn.Linear(32, 4)
        self.up, self.down = nn.Parameter(numbers(4, 32, 64) * 0.1), nn.Parameter(numbers(4, 64, 32) * 0.1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the tokens themselves."""
        x = self.embed(input_ids).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        share = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights)
        outs = torch.einsum("neh,ehd->ned", F.silu(torch.einsum("nd,edh->neh", x, self.up)), self.down)
        return F.cross_entropy((outs * share.unsqueeze(-1)).sum(1) @ self.embed.weight.t(), input_ids.flatten())


@architecture("tiny")
def dense_mixture_of_experts(size: str) -> Subject:
    """A mixture of experts without data-dependent shapes."""
    ids = tokens(VOCABULARY[size], 32, BATCH[size][1])
    return Subject("mixture of experts", Experts(VOCABULARY[size]), {"input_ids": ids})
