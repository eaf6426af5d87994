"""pytorch 193193 (CUDA): compiled checkpoints of the same blocks twice in one graph hold several blocks' values.

The report is about peaks under Inductor on CUDA. Two traversals of shared, checkpointed blocks are compiled in one
graph; its backward pass computes several blocks again before it uses the first of them.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.upstream.common import NEEDS_CUDA, concluded, mib
from benchmarks.upstream.issue_197838 import Block
from remat import ActivationBytes
from remat.tags.passes import TagPartitioner


class Twice(nn.Module):
    """Two inputs through the same blocks, one after the other; each block's call is checkpointed or not."""

    def __init__(self, blocks: int, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean square of the difference of both."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False) if self.checkpointed else block(y)
        return (x - y).square().mean()


def peak(module: nn.Module, call: object, *inputs: torch.Tensor) -> int:
    """The allocator's peak of the second step."""
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(*inputs).backward()
    return int(torch.cuda.max_memory_allocated() - before)


def main() -> int:
    """Peaks of eager checkpoints, compiled ones, and a tagged plan within the eager ones' peak."""
    if not torch.cuda.is_available():
        print(NEEDS_CUDA)
        return 0
    with torch.device("cuda"):
        torch.manual_seed(1)
        module = Twice(12, 512, checkpointed=True)
        plain = Twice(12, 512, checkpointed=False)
        plain.load_state_dict(module.state_dict())
        x, y = torch.randn(8, 512, 512), torch.randn(8, 512, 512)
    eager = peak(module, module, x, y)
    compiled = peak(module, torch.compile(module, dynamic=False), x, y)
    with inductor.patch(custom_partitioner_fn=TagPartitioner(ActivationBytes(eager), planner="local", time_limit_s=30)):
        ours = peak(plain, torch.compile(plain, dynamic=False), x, y)
    print(f"eager checkpoints {mib(eager)}, compiled {mib(compiled)}, tagged {mib(ours)}")
    return concluded(compiled > 1.1 * eager, ours <= eager)
