"""DistributedDataParallel around a planned module: rank 0 plans, every rank runs the same plan.

Run it with `torchrun --nproc-per-node 2 examples/ddp.py`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)))
    remat.enable(model, budget=remat.Fraction(0.7), ranks=True)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    for step in range(3):
        loss = wrapped(torch.randn(512, 64)).square().mean()
        loss.backward()
        wrapped.zero_grad()
        print(f"rank {rank} step {step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
