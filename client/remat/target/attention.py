"""Which kernels `scaled_dot_product_attention` runs on a CUDA device, decided without one.

PyTorch asks the device (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). The same rules stand here, for compute
capability 8.0 and later: flash where it can, else memory-efficient, else the composite. cuDNN's kernels, last in that
order, are not chosen. What the process has switched off by `torch.nn.attention.sdpa_kernel` stays off.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .. import _compat
from ..device import NAMED

HALVES = (torch.float16, torch.bfloat16)


def chosen_attention() -> AbstractContextManager[Any]:
    """Inside, attention on a CUDA device becomes the kernels of its choice, which differentiate as there."""
    return _compat.replaced("scaled_dot_product_attention", ("CUDA", "AutogradCUDA"), _attention)


def choice(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, gqa: bool) -> str:
    """The kernels: "flash", "efficient" or "math"."""
    backend: Any = getattr(torch.backends, NAMED.type)
    four = all(t.dim() == 4 for t in (query, key, value))
    if not four or any(t.stride(-1) != 1 or 0 in t.shape for t in (query, key, value)):
        return "math"
    widths, heads = {t.shape[-1] for t in (query, key, value)}, {t.shape[1] for t in (query, key, value)}
    same_heads = len(heads) == 1
    if (
        backend.flash_sdp_enabled()
        and mask is None
        and query.dtype in HALVES
        and len(widths) == 1
        and max(widths) <= 256
        and (same_heads or gqa)
        and not (causal and query.shape[2] != key.shape[2])
    ):
        return "flash"
    aligned = 8 if query.dtype in HALVES else 4
    if (
        backend.mem_efficient_sdp_enabled()
        and query.dtype in (*HALVES, torch.float32)
        and same_heads
        and not gqa
        and query.shape[-1] == key.shape[-1]
        and all(width % aligned == 0 for width in widths)
        and not (causal and mask is not None)
    ):
        return "efficient"
    return "math"


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    found = choice(query, key, value, attn_mask, is_causal, enable_gqa)
    if found == "flash":
        width = int(query.shape[-1])
        scale = width**-0.5 if scale is None else scale
        pad = -width % 8
        if pad:
            query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
        made = _compat.FLASH_ATTENTION(query, key, value, dropout_p, is_causal, False, scale=scale)
        return made[0][..., :width] if pad else made[0]  # type: ignore[no-any-return]
    if found == "efficient":
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        made = _compat.EFFICIENT_ATTENTION(query, key, value, bias, trains, dropout_p, is_causal, scale=scale)
        return made[0]  # type: ignore[no-any-return]
    made = _compat.COMPOSITE_ATTENTION(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return made[0]  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as what is added to the scores: its rows padded to a multiple of 16 bytes, then expanded."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device))
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    alignment = 16
    pad = -int(mask.shape[-1]) % alignment
    if pad and mask.shape[-1] == key.shape[2]:
        mask = torch.nn.functional.pad(mask, (0, pad))[..., : key.shape[2]]
    return mask.expand(shape)
