"""`make soak`: 3,000 steps of a small model with eight lengths, with take-overs, evaluation and checkpoints between.

After a third of the steps the memory of the process, its file handles and its plans are noted; at the end none may have
become more. Each checkpoint is loaded into a model that is enabled anew, so that all lengths are planned once more.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import nn

import remat
from remat.training.enable import plans_of

from .__main__ import commit, rows, write
from .training import Improving, TakeOvers, answered

LENGTHS = (8, 12, 16, 20, 24, 28, 32, 40)
PARTS = 6
"""Of the training: after each a checkpoint is loaded into another model."""

MORE_BYTES = 32 * 2**20
"""What the allocator of the host may keep more."""


class Model(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Seen(NamedTuple):
    """Bytes of the process, its open files, the plans that a model has."""

    memory: int
    files: int
    plans: int

    @classmethod
    def of(cls, model: nn.Module) -> Seen:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        files = len(os.listdir("/proc/self/fd"))
        return cls(psutil.Process().memory_info().rss, files, len(plans_of(model).plans))

    def less_than(self, now: Seen) -> list[str]:
        """What has become more."""
        more = zip(self._fields, self, now, (MORE_BYTES, 0, 0), strict=True)
        return [name for name, before, after, allowed in more if after > before + allowed]


def part(file: Path, steps: range, took: Counter[int], counted: TakeOvers) -> Seen:
    """Train from the checkpoint to the next one, and count the take-overs of each length."""
    model, planner = Model(), Improving()
    remat.enable(model, budget="85%", planner=planner, most_plans=len(LENGTHS))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if file.exists():
        there = torch.load(file)
        model.load_state_dict(there["model"])
        optimizer.load_state_dict(there["optimizer"])
    for step in steps:
        length, before = LENGTHS[step % len(LENGTHS)], counted.number
        tokens = torch.randint(0, 32, (4, length))
        model(tokens).backward()
        took[length] += counted.number - before
        optimizer.step()
        optimizer.zero_grad()
        planner.step()
        answered([planner])
        if step % 50 == 0:
            with torch.no_grad():
                model.eval()(tokens)
                model.train()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return Seen.of(model)


def main() -> int:
    """0 where nothing has become more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps, began = parser.parse_args().steps, time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    took, counted, log = Counter[int](), TakeOvers(), logging.getLogger("remat")
    log.addHandler(counted)
    log.setLevel(logging.INFO)
    seen, lines = [], ["| step | memory | open files | plans | take-overs of a length, at least |", "| --- " * 5 + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for i in range(PARTS):
            steps_of = range(steps * i // PARTS, steps * (i + 1) // PARTS)
            seen.append(part(Path(folder) / "checkpoint.pt", steps_of, took, counted))
            least, (memory, files, plans) = min(took[length] for length in LENGTHS), seen[-1]
            lines.append(f"| {steps_of.stop} | {memory / 2**20:.1f} MiB | {files} | {plans} | {least} |")
            print(lines[-1], flush=True)
    faults = seen[1].less_than(seen[-1]) + [f"take-overs of {n}" for n in LENGTHS if took[n] < 2]
    said = f"Not as it must be: {', '.join(faults)}." if faults else "Flat."
    seconds = round(time.monotonic() - began)
    when = f"{steps} steps in {seconds} s, {datetime.date.today()}, commit {commit()}"
    lines += ["", f"{said} {when}. `make soak` writes this.", ""]
    print(said)
    write(rows(), "\n".join(lines))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
