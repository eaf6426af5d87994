"""pytorch 197838: the peak of a step does not fall with `activation_memory_budget`; at some settings it rises.

`patches/peak.patch` adds a solver that looks at the peak.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from benchmarks.upstream.common import by_tags, by_torch, concluded, mib, step

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.1)
"""Torch takes some 5 s for each: all of the program took 76 s with ten of them, on two cores under other work."""


class Block(nn.Module):
    """A transformer's block: attention, then two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch, length and width in, the same out."""
        batch, length, width = x.shape
        q, k, v = self.into(self.one(x)).reshape(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        z: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.two(x))))
        return z


def model(blocks: int) -> nn.Module:
    """Blocks one after the other: the same weights each time."""
    torch.manual_seed(1)
    return nn.Sequential(*[Block(128) for _ in range(blocks)])


def main() -> int:
    """Measured peaks from setting to setting, and of tagged plans from budget to budget."""
    torch.set_num_threads(1)
    module, x = model(4), torch.randn(4, 128, 128)
    peaks = {}
    for budget in BUDGETS:
        peaks[budget] = by_torch(module, x, budget).peak_bytes
        print(f"activation_memory_budget {budget}: {mib(peaks[budget])}", flush=True)
    rises = [b for (_, a), (b, c) in itertools.pairwise(peaks.items()) if c > a]
    print(f"the peak rises where the setting falls to: {', '.join(map(str, rises)) or 'none'}")
    plain = step(module, None, x).peak_bytes
    ours = []
    for share in (90, 75, 60, 45):
        peak = by_tags(module, x, plain * share // 100).peak_bytes
        ours.append((peak, plain * share // 100))
        print(f"tagged within {mib(plain * share // 100)}: {mib(peak)}")
    falls = all(a >= b for (a, _), (b, _) in itertools.pairwise(ours))
    return concluded(bool(rises), falls and all(peak <= budget for peak, budget in ours))
