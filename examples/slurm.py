"""One rank of a Slurm job: torch.distributed from Slurm's variables, plans from the planner of REMAT_BASE_URL.

Started by `examples/slurm.sbatch`, once for each task. Only the first rank asks; the plan is broadcast.
"""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat


def main() -> None:
    rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    logging.basicConfig(level=logging.WARNING)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["SLURM_LOCALID"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # MASTER_ADDR and MASTER_PORT come from the job script
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    remat.enable(model, budget=remat.Fraction(0.7), ranks=True, optimizer=optimizer)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    for step in range(3):
        loss = wrapped(torch.randn(512, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
