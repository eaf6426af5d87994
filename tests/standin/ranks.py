"""What one of two ranks of a pipeline does, each in a process with a stand-in of its own: see `test_reserved.py`.

Their messages go over gloo, which reads and writes the stand-in's memory as it is the host's.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "client", "solver", "service")] + [str(ROOT)]
os.environ["OMP_NUM_THREADS"] = "1"

from standin import device  # noqa: E402

device.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402

import remat  # noqa: E402
from remat.pipelines.pipeline import PipelinePlans, Search  # noqa: E402
from remat.planning.budget import Budget  # noqa: E402
from standin.module import CONTEXT_BYTES  # noqa: E402
from standin.movable import DEVICE, MIB  # noqa: E402
from standin.test_reserved import trained, waves  # noqa: E402

ROWS, MICROS = 8192, 4
LESS = {"1F1B": (20 * MIB, 0), "Interleaved1F1B": (40 * MIB, 40 * MIB), "ZBVZeroBubble": (40 * MIB, 40 * MIB)}
"""Less than each rank reserves without plans, in large segments. The last rank of 1F1B holds one micro-batch only."""

SCHEDULES: dict[str, Callable[..., Any]] = {
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
}


class Rank:
    """A rank's stages, their schedule, a batch and an optimizer, equal at each call."""

    def __init__(self, name: str) -> None:
        rank, count = dist.get_rank(), 2 if name == "1F1B" else 4
        mine = {2: [rank], 4: [rank, 3 - rank] if name == "ZBVZeroBubble" else [rank, rank + 2]}[count]
        parts = [nn.Sequential(*waves(2)) for _ in range(count)]
        stages = [pipelining.PipelineStage(parts[i], i, count, DEVICE) for i in mine]
        self.schedule = SCHEDULES[name](
            stages[0] if count == 2 else stages, MICROS, loss_fn=lambda y, t: (y - t).square().mean()
        )
        self.stages = stages
        x = torch.randn(ROWS * MICROS, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        self.args = (x,) if 0 in mine else ()
        self.kwargs = {"target": x} if count - 1 in mine else {}
        self.parameters = [p for i in mine for p in parts[i].parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters)

    def step(self) -> None:
        """Of the schedule; what it returns is not held."""
        self.schedule.step(*self.args, **self.kwargs)

    def plans(self, budget: Budget) -> PipelinePlans:
        """Of its stages."""
        return remat.optimize_pipeline(
            self.stages,
            self.schedule,
            self.args,
            self.kwargs,
            budget=budget,
            planner="greedy",
            optimizer=self.optimizer,
        )

    def reserved(self) -> int:
        """What training reserves, first of all steps those of the schedule's first."""
        return trained(self.step, self.optimizer)

    def learned(self) -> float:
        """A figure of all parameters."""
        return sum(float(p.double().square().sum()) for p in self.parameters)


def reserving(name: str) -> dict[str, Any]:
    """A schedule without plans, by plans within less than it reserves, and by plans that were not rehearsed."""
    plain = Rank(name)
    needs = plain.reserved()
    found: dict[str, Any] = {"plain": needs, "learned": [plain.learned()]}
    del plain
    device.empty_cache()
    budget = CONTEXT_BYTES + needs - LESS[name][dist.get_rank()]
    rank = Rank(name)
    plans = rank.plans(budget)
    found.update(budget=budget - CONTEXT_BYTES, foreseen=plans.reserved_bytes, overhead=plans.overhead, text=str(plans))
    found["watched"] = [plans.predicted_bytes, plans.measured_bytes]
    with device.limited(budget - CONTEXT_BYTES):
        found["seen"] = rank.reserved()
    found["learned"].append(rank.learned())
    del rank, plans
    device.empty_cache()
    Search._over = lambda *_: 0
    bold = Rank(name)
    bold.plans(budget)
    found["bold"] = bold.reserved()
    return found


def main() -> None:
    """One rank: its number, a folder for what it finds, a schedule."""
    rank, folder, name = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    (folder / f"found-{rank}").write_text(json.dumps(reserving(name)))
    dist.barrier()


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as the lane ends
