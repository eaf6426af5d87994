"""pytorch 190717: at `activation_memory_budget` 0 with `graphsafe_rng_functionalization`, dropout draws other masks."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.upstream.common import by_tags, by_torch, concluded, error, step


def main() -> int:
    """The mask that the forward pass used is read off the output, the one of the backward pass off the gradient."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    parts = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5))]
    module, x = nn.Sequential(*parts), torch.linspace(-1, 1, 256 * 64).reshape(256, 64)
    plain = step(module, None, x)
    found = by_torch(module, x, 0.0, graphsafe_rng_functionalization=True)
    off = error(plain, found)
    print(f"activation_memory_budget 0: gradients are off by {off:.2g}")
    ours = by_tags(module, x, plain.peak_bytes * 85 // 100)
    print(f"tagged at 85 % of the plain peak: off by {error(plain, ours):.2g}")
    return concluded(off > 1e-3, error(plain, ours) == 0)
