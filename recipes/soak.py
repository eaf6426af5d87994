"""`make soak`: 3,000 steps of a small model with eight lengths, with take-overs, evaluation and checkpoints between.

After a third of the steps the memory of the process, its file handles and its plans are noted; at the end none may have
become more. Each checkpoint is loaded into a model that is enabled anew, so that all lengths are planned once more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import remat
from remat.planning.greedy import greedy_answer
from remat.training.enable import plans_of
from remat_ir import Answer, Problem

LENGTHS = (8, 12, 16, 20, 24, 28, 32, 40)
MORE_BYTES = 32 * 2**20
"""What the allocator of the host may keep more."""


class Tighter:
    """A planner whose answers alternate between a smaller budget and the one that is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def plan(self, problem: Problem, options: Any = None, *, on_progress: Any = None) -> Answer:
        self.asked += 1
        if self.asked % 2:
            fixed = problem.graph.fixed_bytes
            tight = greedy_answer(Problem(problem.graph, fixed + int(0.8 * (problem.budget_bytes - fixed))))
            if tight.plan is not None:
                return Answer.of_plan(problem, tight.plan, method="greedy")
        return greedy_answer(problem)


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


def seen(model: nn.Module) -> tuple[int, int, int]:
    """Bytes of the process, its open files, the plans that the model keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd")), len(plans_of(model).plans)


def main() -> int:
    """0 where nothing has become more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "checkpoint.pt"
    model, first = Model(), None
    remat.enable(model, budget="70%", planner=Tighter(), most_plans=len(LENGTHS))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    every = max(1, steps // 6)
    for step in range(steps):
        if step and step % every == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            remat.disable(model)
            model = Model()
            model.load_state_dict(torch.load(file)["model"])
            remat.enable(model, budget="70%", planner=Tighter(), most_plans=len(LENGTHS))
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            optimizer.load_state_dict(torch.load(file)["optimizer"])
        tokens = torch.randint(0, 32, (4, LENGTHS[step % len(LENGTHS)]))
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            with torch.no_grad():
                model.eval()(tokens)
                model.train()
        if (step + 1) % every == 0:
            found = seen(model)
            print(f"step {step + 1}: {found[0] / 2**20:.1f} MiB, {found[1]} files, {found[2]} plans", flush=True)
            if step + 1 == 2 * every:
                first = found
    last = seen(model)
    assert first is not None
    faults = [
        name
        for name, before, now, more in zip(("memory", "files", "plans"), first, last, (MORE_BYTES, 0, 0), strict=True)
        if now > before + more
    ]
    print("flat" if not faults else f"more than before: {', '.join(faults)}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
