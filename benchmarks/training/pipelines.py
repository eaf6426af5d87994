"""Whole cycles of pipelines under a budget for each rank: the schedules of `torch.distributed.pipelining`, two ranks.

    python -m benchmarks.training.pipelines [SCHEDULE …] [--share 0.6] [--micros 4] [--out FILE]

Each rank trains its stages by plans next to copies that train without, over gloo. Measured are the allocator's own
events over whole cycles, with the bytes added that are there throughout; what gloo's threads free is seen too. "passes"
is a step of the schedule, "step" that of the optimizer: predicted → measured, in MiB. "plain" is the measured peak
without plans.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import remat
from benchmarks.harness.table import Report
from benchmarks.training.job import CYCLES, MIB, Block, Found, on_ranks
from remat.device import Interval
from remat.profiling.measure import peak_memory

COLUMNS = ("schedule, rank", "budget", "passes", "step", "peak / budget", "peak / predicted", "equal", "plain", "time")
RANKS = 2
SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "1F1B": (pipelining.Schedule1F1B, 1),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, 2),
}
"""Classes of schedules, and how many stages each rank has."""


class Job:
    """One rank's share of a job: its stages, their schedule and their optimizer."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        make, each = SCHEDULES[name]
        rank, count = dist.get_rank(), RANKS * each
        mine = [rank, count - 1 - rank] if "ZBV" in name else list(range(rank, count, RANKS))
        torch.manual_seed(0)
        blocks = [Block(given.width, False) for _ in range(given.layers)]
        long = len(blocks) // count
        parts = [nn.Sequential(*blocks[i * long : (i + 1) * long]) for i in range(count)]
        self.stages = [pipelining.PipelineStage(parts[i], i, count, torch.device("cpu")) for i in mine]
        loss: Any = lambda y, target: (y - target).square().mean()  # noqa: E731
        self.schedule = make(self.stages if each > 1 else self.stages[0], given.micros, loss_fn=loss)
        self.parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, foreach=True)
        x, target = torch.randn(2, given.rows * given.micros, given.width, generator=torch.Generator().manual_seed(1))
        self.args = (x,) if 0 in mine else ()
        self.kwargs: dict[str, Any] = {"target": target, "losses": []} if count - 1 in mine else {}

    def passes(self) -> Interval:
        """A step of the schedule; the outputs of the one before go first, as they do in it."""
        for stage in self.stages:
            stage.clear_runtime_states()

        def step() -> None:  # returns nothing: what the schedule's would return is merged once more
            self.schedule.step(*self.args, **self.kwargs)

        return peak_memory(step)

    def step(self) -> None:
        """The optimizer's."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outcome(self) -> Iterator[torch.Tensor]:
        """Parameters and the optimizer's state."""
        yield from self.parameters
        for state in self.optimizer.state.values():
            yield from state.values()


def measured(name: str, given: argparse.Namespace) -> tuple[Found, int, float]:
    """On this rank: what a cycle came to, the plain peak above the fixed bytes, and the time by plans over plain."""
    jobs = [Job(name, given), Job(name, given)]
    planned = jobs[1]
    plans = remat.optimize_pipeline(
        planned.stages,
        planned.schedule,
        planned.args,
        planned.kwargs,
        budget=remat.Fraction(given.share),
        planner=given.planner,
        optimizer=planned.optimizer,
    )
    peaks: list[tuple[int, int]] = []
    for job in jobs:
        torch.manual_seed(2 + dist.get_rank())
        for _ in range(CYCLES):  # the last one counts: what it lets go was seen to be made
            passes = job.passes()
            step_bytes = peak_memory(job.step).peak_bytes + passes.left_bytes
        peaks.append((passes.peak_bytes, step_bytes))
    (plain, _), (passes_bytes, step_bytes) = peaks
    same = all(torch.equal(a, b) for a, b in zip(*(job.outcome() for job in jobs), strict=True))
    fixed = plans.fixed_bytes
    both = plans.predicted_bytes, passes_bytes + fixed
    row = Found(plans.budget_bytes, *both, plans.update_peak_bytes, step_bytes + fixed, same)
    return row, plain + fixed, plans.overhead


def run(rank: int, given: argparse.Namespace) -> bool:
    """One rank, whether all kept to their budgets; the first one prints the table."""
    kept = True
    with Report("Pipelines under their budgets", COLUMNS, given.out if rank == 0 else None) as report:
        for name in given.schedules or SCHEDULES:
            told: list[Any] = [None] * RANKS
            dist.all_gather_object(told, measured(name, given))
            for other, (found, plain, overhead) in enumerate(told if rank == 0 else []):
                kept = kept and found.kept
                report.add(f"{name}, {other}", *found.cells(), f"{plain / MIB:.1f}", f"+{100 * overhead:.1f} %")
    return kept


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", choices=[*SCHEDULES, []], metavar="SCHEDULE", help="; ".join(SCHEDULES))
    parser.add_argument("--share", type=float, default=0.6, help="of what the rank needs without plans (default 0.6)")
    parser.add_argument("--micros", type=int, default=4, help="micro-batches in a step (default 4)")
    parser.add_argument("--layers", type=int, default=8, help="blocks of the whole network (default 8)")
    parser.add_argument("--width", type=int, default=64, help="of a block (default 64)")
    parser.add_argument("--rows", type=int, default=1024, help="of a micro-batch (default 1024)")
    parser.add_argument("--planner", default="greedy", help="as for remat.optimize_pipeline (default greedy)")
    parser.add_argument("--out", type=Path, help="a file that the table is added to")
    return on_ranks(run, RANKS, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
