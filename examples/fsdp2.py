"""FSDP2 with a plan for each unit and one budget for all of them, given as a share of what plain training needs.

Run it with `torchrun --nproc-per-node 2 examples/fsdp2.py`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import remat


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def train(budget: "remat.Fraction | None") -> list[float]:
    """Losses of six steps, without a plan or by one for each block."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        remat.enable(nn.ModuleList(model), budget=budget, ranks=True, optimizer=optimizer, time_limit_s=5.0)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(6):
        loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if budget is not None:
        print(remat.plans_of(model[0]).division, flush=True)
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    plain, planned = train(None), train(remat.Fraction(0.7))
    for step, loss in enumerate(planned):
        print(f"rank {dist.get_rank()} step {step}: loss {loss:.6f}", flush=True)
    assert plain == planned, "the losses must be equal"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
