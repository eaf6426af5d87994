"""Tensor and sequence parallelism with one plan for all ranks, made for the local shards.

Run it with `torchrun --nproc-per-node 2 examples/tensor_parallel.py`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import remat

WIDTH, LENGTH = 64, 32


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


SPLIT = {
    "norm": SequenceParallel(),
    "wide": ColwiseParallel(input_layouts=Shard(1)),
    "narrow": RowwiseParallel(output_layouts=Shard(1)),
}


def train(budget: "remat.Fraction | None") -> list[float]:
    """Losses of three steps, without a plan or by one."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        parallelize_module(block, mesh, SPLIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        remat.enable(model, budget=budget, ranks=True, optimizer=optimizer, time_limit_s=5.0)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        whole = torch.randn(16, LENGTH, WIDTH)
        loss = model(whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
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
