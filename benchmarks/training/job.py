"""Whole cycles of training jobs under a budget in bytes: micro-steps, clipping, the optimizer's step, averaging.

    python -m benchmarks.training.job [OPTIMIZER …] [--share 0.6] [--layers 6] [--width 192] [--rows 2048] [--out FILE]

Each row trains a residual network by plans next to a copy that trains without one, three cycles each (LBFGS ten).
Measured are the allocator's own events over a whole cycle, with the bytes added that are there throughout. "passes" are
the forward and backward passes of all micro-steps, "step" is all from the clipping to the averaging: predicted →
measured, in MiB.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

import remat
from benchmarks.harness import threads
from benchmarks.harness.table import Report
from remat.profiling.fixed import here
from remat.profiling.measure import peak_memory
from remat.training.enable import plans_of

COLUMNS = ("job", "budget", "passes", "step", "peak / budget", "peak / predicted", "equal")
MIB = 2**20
CYCLES = 3
LONG = 10
"""Cycles of LBFGS, after which its history is full and a pair has been left out of it."""


class Block(nn.Module):
    """A residual block; with matrices alone where an optimizer takes nothing else."""

    def __init__(self, width: int, matrices: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=not matrices)
        self.up, self.down = (nn.Linear(*pair, bias=not matrices) for pair in ((width, 4 * width), (4 * width, width)))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Loss(nn.Module):
    """The end of the network, so that nothing else is returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def network(layers: int, width: int, matrices: bool = False) -> nn.Sequential:
    """Equal weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, matrices) for _ in range(layers)), Loss())


class EightBit(torch.optim.Optimizer):
    """Momentum in bytes, as 8-bit optimizers keep it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Add the sign of a coarse momentum."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["coarse"] = torch.full_like(p, 128, dtype=torch.uint8)
                momentum = (state["coarse"].float() - 128).div_(127).mul_(0.9).add_(p.grad.sign(), alpha=0.1)
                state["coarse"].copy_(momentum.mul(127).add_(128))
                p.add_(momentum, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD with momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Muon": lambda p: torch.optim.Muon(p),
    "8-bit momentum": EightBit,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2, history_size=3),
}


class Setting(NamedTuple):
    """What a job does around its passes."""

    accumulate: int = 1
    clip: bool = False
    ema: bool = False
    release: bool = False

    def __str__(self) -> str:
        parts = [f"{self.accumulate} micro-steps"] * (self.accumulate > 1)
        return ", ".join(["", *parts, *["clipped"] * self.clip, *["EMA"] * self.ema, *["released"] * self.release])


SETTINGS = (Setting(), Setting(4), Setting(1, True), Setting(4, True, True), Setting(1, False, True, True))


class Cycle:
    """One job: its passes and its step, to be run in turn."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, x: torch.Tensor) -> None:
        self.model, self.optimizer, self.setting, self.x = model, optimizer, setting, x
        self.ema = [p.detach().clone() for p in model.parameters()] if setting.ema else []
        self.closing = isinstance(optimizer, torch.optim.LBFGS)

    def passes(self) -> torch.Tensor:
        """All micro-steps."""
        total = torch.zeros(())
        for _ in range(self.setting.accumulate):
            loss = self.model(self.x) / self.setting.accumulate
            loss.backward()
            total += loss.detach()
        return total

    def step(self) -> None:
        """Clip, step, average, and let the gradients go."""
        if self.setting.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.closing:
            self.optimizer.step(self._closure)
        else:
            self.optimizer.step()
        if self.ema:
            with torch.no_grad():
                torch._foreach_lerp_(self.ema, list(self.model.parameters()), 0.01)
        self.optimizer.zero_grad()

    def whole(self) -> None:
        """A cycle."""
        if not self.closing:
            self.passes()
        self.step()

    def several(self, cycles: int = CYCLES) -> None:
        """Cycles."""
        for _ in range(cycles):
            self.whole()

    def _closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.passes()

    def outcome(self) -> Iterator[torch.Tensor]:
        """Parameters, buffers, averages and the optimizer's state, which released gradients make in another order."""
        found: list[Any] = [*self.model.state_dict().values(), *self.ema]
        states = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        found += [value for state in states for value in state.values()]
        for value in found:
            yield from (here(t) for t in (value if isinstance(value, list) else [value]) if torch.is_tensor(t))


class Found(NamedTuple):
    """Of one job, in bytes: see the module."""

    budget: int
    predicted_passes: int
    passes: int
    predicted_step: int
    step: int
    equal: bool

    @property
    def of_budget(self) -> float:
        """The measured peak of the cycle over the budget."""
        return max(self.passes, self.step) / self.budget

    @property
    def of_predicted(self) -> float:
        """The measured peak of the cycle over its prediction."""
        return max(self.passes, self.step) / max(self.predicted_passes, self.predicted_step)

    @property
    def kept(self) -> bool:
        """Whether the cycle stayed inside its budget, came to what was predicted, and left equal bits."""
        return self.of_budget <= 1 and self.equal and abs(self.of_predicted - 1) <= 0.03

    def cells(self) -> Iterator[str]:
        """Of the table."""
        yield f"{self.budget / MIB:.1f}"
        yield f"{self.predicted_passes / MIB:.1f} → {self.passes / MIB:.1f}"
        yield f"{self.predicted_step / MIB:.1f} → {self.step / MIB:.1f}"
        yield f"{self.of_budget:.3f}"
        yield f"{self.of_predicted:.3f}"
        yield "bitwise" if self.equal else "no"


def planned(job: Cycle, share: float, buckets_bytes: int = 0, **more: Any) -> Callable[[int, int, bool], Found]:
    """Plan a job's model in bytes of the device, buckets included; what makes a row of what is then measured."""
    setting, model = job.setting, job.model
    options: dict[str, Any] = {
        "planner": "greedy",
        "self_check": False,
        "accumulate": setting.accumulate,
        "clip_grad_norm": setting.clip,
        "release_gradients": setting.release,
        "optimizer": job.optimizer,
        "ema": job.ema or None,
        **more,
    }
    probe = remat.optimize(model, (job.x,), budget=remat.Fraction(share), **options)
    (plan,) = (p for p in remat.plans_of(probe).plans if p)
    remat.disable(probe)
    remat.enable(model, budget=plan.answer.budget_bytes + buckets_bytes, **options)

    def found(passes_bytes: int, step_bytes: int, same: bool) -> Found:
        (plan,) = (p for p in plans_of(model).plans if p)
        made = ("gradients", "optimizer step's temporaries", *["optimizer state"] * job.closing)
        fixed = plan.step.graph.fixed_bytes - sum(plan.step.fixed.get(name, 0) for name in made)
        passes = plan.predicted_bytes, passes_bytes + fixed
        return Found(plan.answer.budget_bytes, *passes, plan.update_peak_bytes, step_bytes + fixed, same)

    return found


def measured(
    name: str, setting: Setting, share: float = 0.6, layers: int = 6, width: int = 192, rows: int = 2048
) -> Found:
    """Train by plans in bytes of the device, and without; the same losses, or the row says that it is not so."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    jobs = []
    for _ in range(2):
        model = network(layers, width, matrices=name == "Muon")
        jobs.append(Cycle(model, OPTIMIZERS[name](list(model.parameters())), setting, x))
    make = planned(jobs[1], share)
    plans_of(jobs[1].model).plan_for((x,))
    return make(*trained(jobs))


def trained(jobs: Sequence[Cycle], seed: int = 2) -> tuple[int, int, bool]:
    """Train jobs alike: the measured peaks of the last one's passes and step, and whether all ended the same."""
    for job in jobs:
        torch.manual_seed(seed)
        if job.closing:  # it lets tensors of its state go, of which a later window would not know
            passes_bytes = step_bytes = peak_memory(lambda job=job: job.several(LONG)).peak_bytes
            continue
        for _ in range(CYCLES):  # the last one counts: what it lets go was seen to be made
            passes = peak_memory(job.passes)
            passes_bytes, step_bytes = passes.peak_bytes, peak_memory(job.step).peak_bytes + passes.left_bytes
    first, *others = ([*job.outcome()] for job in jobs)
    same = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return passes_bytes, step_bytes, same


def on_ranks(work: Callable[..., bool], ranks: int, *arguments: Any) -> int:
    """Run some work on each of so many ranks over gloo, each with one thread and a cache of its own.

    What gloo's threads free is seen (`benchmarks.harness.threads`). 1 where a rank's work gives False, or ends early.
    """
    threads.tell()
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = work, ranks, folder, arguments
            processes.start_processes(_on_rank, given, nprocs=ranks, start_method="fork")
        except processes.ProcessExitedException:
            return 1
    return 0


def _on_rank(rank: int, work: Callable[..., bool], ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["REMAT_CACHE_DIR"] = str(Path(folder) / f"cache-{rank}")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    kept = work(rank, *arguments)
    dist.destroy_process_group()
    if not kept:
        raise SystemExit(1)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("optimizers", nargs="*", metavar="OPTIMIZER", help="; ".join(OPTIMIZERS))
    parser.add_argument("--share", type=float, default=0.6, help="of what plain training needs (default 0.6)")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the network (default 6)")
    parser.add_argument("--width", type=int, default=192, help="of a block (default 192)")
    parser.add_argument("--rows", type=int, default=2048, help="of a batch (default 2048)")
    parser.add_argument("--out", type=Path, help="a file that the table is added to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = True
    with Report("The whole job under its budget", COLUMNS, given.out) as report:
        for name in given.optimizers or OPTIMIZERS:
            for setting in SETTINGS[:1] if name == "LBFGS" else SETTINGS:
                found = measured(name, setting, given.share, given.layers, given.width, given.rows)
                kept = kept and found.kept
                report.add(f"{name}{setting}", *found.cells())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
