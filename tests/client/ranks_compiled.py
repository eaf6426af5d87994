"""Cases of two ranks under `torch.compile`: see `ranks_cases`."""

from typing import Any

import torch
import torch.distributed as dist
from ranks_training import FRACTION, WIDE, Block, blocks, data, message, trained
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat


class Whole(nn.Module):
    """Blocks in a module that is not torch's own, whose call Dynamo takes as one."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled() -> dict[str, Any]:
    """`torch.compile` of DDP, by Inductor and by plans under Inductor."""
    torch._dynamo.config.optimize_ddp = False
    plain, planned = Whole(blocks=1), Whole(blocks=1)
    backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner="inductor")
    wrapped = torch.compile(DistributedDataParallel(planned), backend=backend, dynamic=False)
    outcome = [
        trained(plain, torch.compile(DistributedDataParallel(plain), dynamic=False), rows=512),
        trained(planned, wrapped, rows=512),
    ]
    (answer,) = backend.answers
    return {"plain": outcome[0], "planned": outcome[1], "overhead": answer.overhead, "digest": answer.digest}


def sharded_compiled() -> dict[str, Any]:
    """FSDP2 around blocks that are compiled each, by Inductor and by plans under Inductor."""
    plain, planned = blocks(2), blocks(2)
    backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner="inductor")
    for model, compiler in ((plain, "inductor"), (planned, backend)):
        for block in model:
            block.compile(backend=compiler, dynamic=False)
            fully_shard(block)
        fully_shard(model)
    outcome = {"plain": trained(plain, plain, rows=512), "planned": trained(planned, planned, rows=512)}
    found = backend.answers
    return {**outcome, "overhead": min(a.overhead or 0 for a in found), "digest": [a.digest for a in found]}


def compiled_refused() -> dict[str, Any]:
    """Buckets that are compiled one by one; ranks whose inputs are not of one shape."""
    rank = dist.get_rank()
    torch._dynamo.config.optimize_ddp = True
    found = {}
    for inner in ("eager", "inductor"):
        backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner=inner)
        wrapped = torch.compile(DistributedDataParallel(Whole(WIDE)), backend=backend, dynamic=False)
        found[f"buckets, {inner}"] = message(lambda wrapped=wrapped: wrapped(data(0, width=WIDE)))
    backend = remat.backend(FRACTION, planner="greedy", ranks=True, inner="inductor")
    alone = torch.compile(Whole(), backend=backend, dynamic=False)
    found["shapes"] = message(lambda: alone(data(0, rows=8 + 8 * rank)))
    return found
