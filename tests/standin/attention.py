"""Memory-efficient attention as CUDA's kernels have it: seed and offset of its dropout lie on the host.

The real backward kernel reads them there (aten/src/ATen/native/transformers/cuda/attention_backward.cu): given ones on
the device, it dereferences the device's address on the host, and the process dies. Here it raises.
"""

from __future__ import annotations

import math
from typing import Any

import torch

ROUNDED = 32
"""The log-sum-exp is as long as the sequence rounded up to so many."""

_kept: list[Any] = []


class SegmentationFault(BaseException):
    """What would end the process on a device: nothing that catches errors of a kernel may go on after it."""


def register() -> None:
    """From now on attention on the stand-in runs these kernels."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", _forward, "CUDA")
    library.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CUDA")
    _kept.append(library)


def _scores(q: Any, k: Any, bias: Any, causal: bool, scale: float | None) -> Any:
    scores = (q @ k.transpose(-1, -2)) * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        scores = scores + bias
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -1e30)
    return scores


def _kept_share(seed: Any, offset: Any, q: Any, k: Any, dropout: float) -> Any:
    if dropout == 0:
        return 1.0
    drawn = torch.Generator().manual_seed(int(seed) * 7919 + int(offset))
    shape = (*q.shape[:-1], k.shape[-2])
    kept = torch.rand(shape, generator=drawn) >= dropout
    return kept.to(q.device).to(q.dtype) / (1 - dropout)


def _as_stored(found: Any) -> Any:
    """The kernels write heads after positions."""
    return found.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(q: Any, k: Any, v: Any, bias: Any, lse: bool, dropout: float = 0.0, causal: bool = False, *,
             scale: float | None = None) -> Any:  # fmt: skip
    generator = torch.cuda.default_generators[q.device.index]
    state = generator.get_state().view(torch.int64)
    seed, offset = state[0].clone(), state[1].clone()
    if dropout > 0:
        state[1] += 4
        generator.set_state(state.view(torch.uint8))
    weights = _scores(q, k, bias, causal, scale).softmax(-1) * _kept_share(seed, offset, q, k, dropout)
    length = math.ceil(q.shape[2] / ROUNDED) * ROUNDED if lse else 0
    return _as_stored(weights @ v), torch.zeros(q.shape[0], q.shape[1], length, device=q.device), seed, offset


def _backward(gradient: Any, q: Any, k: Any, v: Any, bias: Any, output: Any, lse: Any, seed: Any, offset: Any,
              dropout: float, wanted: Any, causal: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    if seed.device.type != "cpu" or offset.device.type != "cpu":
        raise SegmentationFault(f"seed on {seed.device}, offset on {offset.device}: the host reads both")
    share = _kept_share(seed, offset, q, k, dropout)
    weights = _scores(q, k, bias, causal, scale).softmax(-1)
    for_v = (weights * share).transpose(-1, -2) @ gradient
    for_weights = (gradient @ v.transpose(-1, -2)) * share
    for_scores = weights * (for_weights - (for_weights * weights).sum(-1, keepdim=True))
    scaled = for_scores * (scale or 1 / math.sqrt(q.shape[-1]))
    gradients = [_as_stored(found) for found in (scaled @ k, scaled.transpose(-1, -2) @ q, for_v)]
    return (*gradients, for_scores if bias is not None and wanted[3] else torch.Tensor())
