"""Captures of one step on a busy machine (`python -m benchmarks.training.profiles`): what its kernels come to.

A small GPT-2 from its config, one torch thread. Each capture measures all kernels anew, with no table. The command
starts busy loops of its own next to them, and ends them. Times are processor time; the step is the least of five real
ones, forward and backward, without a plan. The first row has no loops.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.harness.machine import machine
from benchmarks.harness.table import table
from benchmarks.models.language import gpt2
from benchmarks.models.subject import Subject
from remat.profiling.measure import forward_backward, seconds
from remat.training.step import training_step

RESULTS = Path(__file__).parents[1] / "results" / "profiles.md"
STEPS = 5
COLUMNS = ("loops", "load", "capture", "kernels' sum", "samples vary by", "a step", "sum / step", "wall time")


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that compute without an end, until the block's."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def captured(subject: Subject) -> tuple[float, float, float, float]:
    """Of one capture: the sum of its kernels in s, how far their samples vary, a real step in s, the wall time."""
    began = time.perf_counter()
    step = training_step(subject.model, (), subject.inputs)
    took = time.perf_counter() - began
    run = forward_backward(subject.model, kwargs=subject.inputs)
    least = min(seconds(run, clock=time.thread_time) for _ in range(STEPS))
    return step.graph.total_cost_ns / 1e9, step.profiled.spread or 0.0, least, took


def difference(sums: list[float]) -> float:
    """By how much the most is above the least, as a share."""
    return max(sums) / min(sums) - 1


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--captures", type=int, default=4, help="next to the loops")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject, ran_on, rows, sums = gpt2("small"), machine("torch"), [], []
    for loops, number in [(0, 1), *((given.loops, number) for number in range(1, given.captures + 1))]:
        with busy(loops):
            total, vary, step, took = captured(subject)
            load = os.getloadavg()[0]
        sums += [total] * (loops > 0)
        figures = f"{1e3 * total:.0f} ms", f"{100 * vary:.0f} %", f"{1e3 * step:.0f} ms", f"{total / step:.2f}"
        rows.append((loops, f"{load:.1f}", number, *figures, f"{took:.0f} s"))
        print(*rows[-1], flush=True)
    command = f"python -m benchmarks.training.profiles --loops {given.loops} --captures {given.captures}"
    lines = [
        "# Profiles on a busy machine, measured",
        f"`{command}`, {ran_on.date}; {machine('torch').since(ran_on)}. No GPU was measured.",
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        table(COLUMNS, rows),
        f"Next to {given.loops} loops the sums of {given.captures} captures differ by {100 * difference(sums):.0f} %.",
    ]
    print(lines[-1])
    given.out.write_text("\n\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
