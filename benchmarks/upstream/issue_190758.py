"""pytorch 190758: with dropout, gradients are wrong, silently, at any `activation_memory_budget` below 1."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.upstream.common import by_tags, by_torch, concluded, error, mib, step

BUDGETS = (0.9, 0.5, 0.1)


def model(dropout: float = 0.3) -> nn.Module:
    """Products, cheap operators between them, and dropout: the same weights each time."""
    torch.manual_seed(1)
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(dropout)]
    return nn.Sequential(*parts)


def main() -> int:
    """Gradients against the plain step's, from the same seed."""
    torch.set_num_threads(1)
    module, x = model(), torch.linspace(-1, 1, 512 * 128).reshape(512, 128)
    plain = step(module, None, x)
    wrong = []
    for budget in BUDGETS:
        off = error(plain, by_torch(module, x, budget))
        wrong.append(off > 1e-3)
        print(f"activation_memory_budget {budget}: gradients are off by {off:.2g}")
    ours = []
    for share in (80, 60):
        found = by_tags(module, x, plain.peak_bytes * share // 100)
        off = error(plain, found)
        ours.append(off == 0 and found.peak_bytes <= plain.peak_bytes * share // 100)
        print(f"tagged at {share} % of {mib(plain.peak_bytes)}: {mib(found.peak_bytes)}, gradients off by {off:.2g}")
    return concluded(any(wrong), all(ours))
