"""A pipeline of two stages by 1F1B, each rank inside a budget: a share of what it needs without plans.

Run it with `torchrun --nproc-per-node 2 examples/pipeline.py`. The first rank holds two micro-batches between their
forward and backward passes and the last rank one, so that the first one computes more again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import remat

WIDTH, ROWS, MICROS = 64, 512, 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def train(budget: "remat.Fraction | None") -> list[float]:
    """The norms of the gradients of three steps, without plans or by those of the pipeline."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    halves = [nn.Sequential(*(Block() for _ in range(3))) for _ in range(2)]
    stage = PipelineStage(halves[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROS, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer = torch.optim.AdamW(halves[rank].parameters(), lr=1e-3)
    x, target = torch.randn(ROWS * MICROS, WIDTH), torch.randn(ROWS * MICROS, WIDTH)
    args = (x,) if rank == 0 else ()
    kwargs = {"target": target, "losses": []} if rank == 1 else {}
    if budget is not None:
        plans = remat.optimize_pipeline(
            stage, schedule, args, kwargs, budget=budget, optimizer=optimizer, time_limit_s=5.0
        )
        print(f"rank {rank}: {plans}", flush=True)
    torch.manual_seed(1 + rank)
    norms = []
    for _ in range(3):
        schedule.step(*args, **kwargs)
        norms.append(float(nn.utils.get_total_norm(p.grad for p in halves[rank].parameters() if p.grad is not None)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def main() -> None:
    dist.init_process_group("gloo")
    plain, planned = train(None), train(remat.Fraction(0.8))
    for step, norm in enumerate(planned):
        print(f"rank {dist.get_rank()} step {step}: gradients' norm {norm:.6f}", flush=True)
    assert plain == planned, "the gradients must be equal"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
