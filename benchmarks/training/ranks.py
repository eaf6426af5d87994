"""Whole cycles of jobs on several ranks under a budget in bytes: data, sharded, tensor and sequence parallelism.

    python -m benchmarks.training.ranks [KIND …] [--share 0.6] [--out FILE]

Each rank trains by one plan for all ranks next to a copy that trains without, AdamW, over gloo. The columns are those
of `benchmarks.training.job`, of the first rank. What gloo's threads free is seen too (`benchmarks.harness.threads`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import remat
from benchmarks.harness.table import Report
from benchmarks.training.job import COLUMNS, Cycle, Found, Setting, network, on_ranks, planned, trained
from remat.profiling.fixed import all_gradients, resident
from remat.training.enable import plans_of
from remat.training.job import Job

DIVIDED = 5
"""Steps after which the budget of several blocks has been divided."""
LAYERS, WIDTH, SAMPLES, LENGTH = 6, 192, 32, 64
TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Kind(NamedTuple):
    """How a job is spread over ranks, and what is run of it: whether foreach needs all parameters of one class."""

    ranks: int
    settings: tuple[Setting, ...]
    split: dict[str, Any] | None = None
    sharded: bool = False
    foreach: bool = True


KINDS = {
    "DDP": Kind(2, (Setting(), Setting(1, True, True))),
    "TP": Kind(2, (Setting(), Setting(4)), TENSOR, foreach=False),
    "TP + SP": Kind(2, (Setting(), Setting(4), Setting(4, True, True)), SEQUENCE),
    "FSDP2": Kind(2, (Setting(), Setting(1, True)), sharded=True),
    "FSDP2 + TP": Kind(4, (Setting(),), SEQUENCE, True),
}


def spread(kind: Kind) -> tuple[nn.Sequential, torch.Tensor]:
    """The network on this rank, and its batch; equal weights at each call."""
    model = network(LAYERS, WIDTH)
    mesh = init_device_mesh(
        "cpu", (kind.ranks // 2, 2) if kind.split else (kind.ranks, 1), mesh_dim_names=("data", "tensor")
    )
    data, tensor = mesh["data"], mesh["tensor"]
    generator = torch.Generator().manual_seed(1 + data.get_local_rank())
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
    if kind.split:
        for block in list(model)[:LAYERS]:
            parallelize_module(block, tensor, kind.split)
        if kind.split is SEQUENCE:
            x = x.chunk(2, 1)[tensor.get_local_rank()].contiguous()
    if kind.sharded:
        for block in list(model)[:LAYERS]:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    return model, x


def planned_units(job: Cycle, share: float) -> Callable[[int, int, bool], Found]:
    """Plan the blocks of a sharded model inside one budget; what makes a row of what is then measured."""
    blocks = nn.ModuleList(list(job.model.children())[:LAYERS])
    remat.enable(blocks, budget=remat.Fraction(share), planner="greedy", ranks=True, optimizer=job.optimizer)
    for _ in range(DIVIDED):
        job.passes()
        job.optimizer.zero_grad()
    plans = plans_of(blocks[0]).division
    assert plans is not None
    left = all_gradients(job.model) + Job(job.optimizer, clip=job.setting.clip).update().temporaries_bytes
    fixed = sum(resident(job.model, job.x, {}).values()) + Job(job.optimizer).update().state_bytes
    whole = fixed + plans.allowed_bytes, fixed + plans.predicted_bytes
    return lambda passes, step, same: Found(*whole, passes + fixed, fixed + left, step + fixed, same)


def measured(name: str, setting: Setting, share: float) -> Found:
    """What one rank's cycles came to."""
    kind, jobs = KINDS[name], []
    for _ in range(2):
        model, x = spread(kind)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=kind.foreach)
        jobs.append(Cycle(model, optimizer, setting, x))
    ddp = not kind.split and not kind.sharded
    if kind.sharded:
        make = planned_units(jobs[1], share)
    else:
        make = planned(jobs[1], share, all_gradients(jobs[1].model) if ddp else 0, ranks=True)
    if ddp:
        for job in jobs:
            job.model = DistributedDataParallel(job.model, gradient_as_bucket_view=True)
    return make(*trained(jobs, 2 + dist.get_rank()))


def run(rank: int, name: str, given: argparse.Namespace) -> bool:
    """One rank, whether it kept to its budgets; the first one adds to the table."""
    kept = True
    with Report(f"{name} under its budget", COLUMNS, given.out if rank == 0 else None) as report:
        for setting in KINDS[name].settings:
            found = measured(name, setting, given.share)
            kept = kept and found.kept
            if rank == 0:
                report.add(f"{name}{setting}", *found.cells())
    return kept


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help="; ".join(KINDS))
    parser.add_argument("--share", type=float, default=0.6, help="of what plain training needs (default 0.6)")
    parser.add_argument("--out", type=Path, help="a file that the table is added to")
    given = parser.parse_args()
    return max(on_ranks(run, KINDS[name].ranks, name, given) for name in given.kinds or KINDS)


if __name__ == "__main__":
    sys.exit(main())
