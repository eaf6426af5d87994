"""Two ranks train a model with and without a plan: one process of the case `ddp` or `fsdp2`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def launch(case: str, kind: str) -> dict[str, Any]:
    """Run both ranks, and gather what they found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    around = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, __file__, case, kind]
    ranks = [
        subprocess.Popen(command, env={**around, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    found = [json.loads(text.splitlines()[-1]) for text in said]
    return {name: [each[name] for each in found] for name in ("plain", "plan")}


def rank(case: str, kind: str) -> dict[str, str]:
    """What this rank's parameters are after three steps, plain and by a plan."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import remat
    from gpu.parts import digest
    from gpu.subjects import SMALL, Block

    number = int(os.environ["RANK"])
    device = torch.device(kind if kind == "cpu" else f"{kind}:{number}")
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl")

    def trained(plan: bool) -> str:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(Block(SMALL.width) for _ in range(3))).to(device)
        if plan and case == "ddp":
            remat.enable(model, budget="40%", planner="greedy", ranks=True)
        if case == "fsdp2":
            for block in model:
                if plan:
                    remat.enable(block, budget="80%", planner="greedy", ranks=True)
                fully_shard(block)
            fully_shard(model)
        wrapped: Any = DistributedDataParallel(model) if case == "ddp" else model
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(10 * step + number)
            x = torch.randn(SMALL.batch, SMALL.length, SMALL.width).to(device)
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        return digest(torch.cat([p.detach().flatten() for p in parts]))

    found = {"plain": trained(False), "plan": trained(True)}
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / part) for part in ("tests", "client", "solver", "service", "")]
    print(json.dumps(rank(*sys.argv[1:])), flush=True)
