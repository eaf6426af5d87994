"""Training on sequences of varying length, 200 steps (`python -m benchmarks.training.shapes`): stalls, hits and peaks.

A small GPT-2 from its config, random tokens, lengths drawn log-normally and rounded up to sixteen; the same batches in
the same order each time. A stall is a step that has to capture, profile and compile before it can run. Solves are
counted where they happen: on the thread that trains, or next to it. Seconds are CPU seconds of the thread that trains.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import remat
from benchmarks.harness.machine import machine
from benchmarks.harness.table import table
from remat.batch.buckets import Buckets
from remat.planning.sources import LocalPlanner
from remat.profiling import measure
from remat.training.step import training_step
from remat_ir import Answer, Problem, budget_at, readable

LONGEST, BATCH, MOST = 128, 4, 4
FRACTION = 0.6
PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100}


class Counting:
    """The planner, and on which thread it was asked."""

    def __init__(self, planner: remat.Planner) -> None:
        self.planner = planner
        self.on_path = self.beside = 0

    def plan(
        self,
        problem: Problem,
        options: remat.SolveOptions = remat.SolveOptions(),  # noqa: B008
        *,
        on_progress: Any = None,
    ) -> Answer:
        """What the planner answers."""
        if threading.current_thread() is threading.main_thread():
            self.on_path += 1
        else:
            self.beside += 1
        return self.planner.plan(problem, options, on_progress=on_progress)


class Row(NamedTuple):
    """One way to train: what it took."""

    name: str
    plans: int
    hits: int
    ahead_s: float
    stalls: int
    stalled_s: float
    longest_s: float
    median_s: float
    total_s: float
    on_path: int
    beside: int
    taken_over: int
    tokens: int
    peak_bytes: int


def lengths_of(steps: int, seed: int = 0) -> list[int]:
    """Log-normal lengths in multiples of sixteen, the longest among them."""
    draw = random.Random(seed)
    found = [min(LONGEST, max(16, int(48 * draw.lognormvariate(0, 0.6)))) for _ in range(steps)]
    found[draw.randrange(steps)] = LONGEST
    return [-(-length // 16) * 16 for length in found]


def batch_of(length: int) -> dict[str, torch.Tensor]:
    """Random tokens of one length."""
    tokens = torch.randint(0, 500, (BATCH, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def model_of() -> nn.Module:
    """Two layers, dropout included."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=LONGEST)
    config.bos_token_id = config.eos_token_id = 1
    config.loss_type = "ForCausalLM"
    config.use_cache = False
    return GPT2LMHeadModel(config)


def ran(name: str, lengths: Sequence[int], buckets: Buckets | None, budget: int | None, ahead: bool) -> Row:
    """Train a fresh model on the batches, by plans within a budget or without one."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counting = Counting(LocalPlanner())
    pad: Callable[[dict[str, torch.Tensor]], dict[str, Any]] = (
        (lambda batch: buckets.pad(batch, PAD)) if buckets is not None else (lambda batch: batch)
    )
    sizes = [buckets.size(n) for n in lengths] if buckets is not None else list(lengths)
    trained: Any = model
    start = time.thread_time()
    if budget is not None:
        asking: dict[str, Any] = {"wait": False, "time_limit_s": 2.0, "max_gap": 0.01}
        # the longest first: what fits there is likely to fit shorter ones too
        example = pad(batch_of(LONGEST))
        trained = remat.optimize(model, (), example, budget=budget, planner=counting, optimizer=optimizer, **asking)
        if ahead and buckets is not None:
            for size in reversed(buckets.sizes):
                remat.plans_of(trained).plan_for((), pad(batch_of(size)))
    planned_s = time.thread_time() - start
    stalls, times, hits, seen = [], [], 0, {id(p) for p in (() if budget is None else remat.plans_of(trained).plans)}
    taken_over = 0
    begin = time.thread_time()
    for length in lengths:
        batch = pad(batch_of(length))
        at = time.thread_time()
        if budget is not None:
            known = set(remat.plans_of(trained).plans)
            planned = remat.plans_of(trained).plan_for((), batch)
            took = time.thread_time() - at
            if set(remat.plans_of(trained).plans) <= known:
                hits += 1
                taken_over += id(planned) not in seen
            else:
                stalls.append(took)
            seen.add(id(planned))
        loss = trained(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.thread_time() - at)
    total_s = time.thread_time() - begin
    peak = max(_peak(trained, model, optimizer, pad(batch_of(size))) for size in sorted(set(sizes)))
    return Row(
        name,
        len(set(sizes)) if budget is not None else 0,
        hits,
        planned_s,
        len(stalls),
        sum(stalls),
        max(times),
        statistics.median(times),
        total_s,
        counting.on_path,
        counting.beside,
        taken_over,
        BATCH * sum(sizes),
        peak,
    )


def _peak(trained: Any, model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> int:
    optimizer.zero_grad()
    found = measure.peak_memory(measure.forward_backward(trained, (), batch)).peak_bytes
    fixed = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), *batch.values()))
    return fixed + found


def report(rows: Sequence[Row], budget: int, steps: int) -> str:
    """The table and what it says."""
    ran_on = machine("torch")
    columns = "kinds, hits, before the first step (s), stalls, stalled (s), longest step (s), median step (ms), "
    columns += "all steps (s), solves on the path, solves next to it, plans that took over, tokens, measured peak"
    body = [
        (
            *(r.name, r.plans, r.hits, f"{r.ahead_s:.1f}", r.stalls, f"{r.stalled_s:.1f}", f"{r.longest_s:.2f}"),
            *(f"{1000 * r.median_s:.0f}", f"{r.total_s:.1f}", r.on_path, r.beside, r.taken_over, r.tokens),
            readable(r.peak_bytes),
        )
        for r in rows
    ]
    lines = [
        "# Varying sequence lengths, measured",
        "",
        f"`python -m benchmarks.training.shapes --steps {steps}`, {ran_on.date}; one thread; {ran_on}. "
        "No GPU was measured.",
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(),
        "",
        f"Budget {readable(budget)}: {FRACTION} of what plain training needs for the longest batch, fixed bytes aside.",
        f"Peaks are measured in one more step of each size. Buckets: at most {MOST} sizes, those that pad the least.",
        "",
        table(("", *columns.split(", ")), body),
        "",
        "A plan of one size is verified on the next before it runs: a new size waits for its capture and its profile,",
        "and a solve, where there is one, goes on next to the training. Kernels of a size between two known ones, or a",
        "little below, are not timed: their times follow from those two. How loaded the machine was shows in the first",
        "row.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "shapes.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lengths = lengths_of(given.steps)
    buckets = Buckets.of(lengths, MOST)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REMAT_CACHE_DIR"] = folder
        budget = budget_at(training_step(model_of(), (), batch_of(LONGEST)).graph, FRACTION)
        rows = [ran("plain training", lengths, None, None, False)]
        print(rows[-1], flush=True)
        for name, used, ahead in (
            ("a plan for each length", None, False),
            (f"{len(buckets.sizes)} buckets", buckets, False),
            (f"{len(buckets.sizes)} buckets, planned before the first step", buckets, True),
        ):
            os.environ["REMAT_CACHE_DIR"] = str(Path(folder) / f"{len(rows)}")
            rows.append(ran(name, lengths, used, budget, ahead))
            print(rows[-1], flush=True)
    given.out.write_text(report(rows, budget, given.steps))


if __name__ == "__main__":
    main()
