"""What it costs to look before each step whether its plan still holds (`python -m benchmarks.training.guards`).

For each model: the median time of finding the plan of a call (arguments, guards, hooks and code) and the tensors that
it takes, over the median time of a step by the plan, in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import remat
from benchmarks.harness.table import table
from benchmarks.models.zoo import build
from benchmarks.training.__main__ import NAMES
from remat.capture.guards import Call, shared_with_state
from remat.profiling.measure import forward_backward, loss_of
from remat.training.planned import Planned


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """The median time of a run, by the thread's own clock: other work on the machine adds nothing to it."""
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return statistics.median(found)


def share(name: str, size: str, rounds: int) -> tuple[str, ...]:
    """One row: milliseconds of a look and of a step, and the one over the other."""
    subject = build(name, size)
    trained = remat.optimize(
        subject.model, (), subject.inputs, budget=remat.Fraction(1.0), planner="greedy", self_check=False
    )

    def look() -> None:
        call = Call(trained.original, trained.original, (), subject.inputs)
        kind = trained._kinds.find(call)
        assert kind is not None
        planned = trained._kinds[kind]
        assert isinstance(planned, Planned)
        assert not shared_with_state(planned.overwritten, planned.holders.tensors(call), call)

    step = forward_backward(trained, (), subject.inputs, loss_of)
    step()
    looked, took = seconds(look, 20 * rounds), seconds(step, rounds)
    return name, f"{1e3 * looked:.3f}", f"{1e3 * took:.1f}", f"{100 * looked / took:.2f} %"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.guards", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=" ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="tiny models: to see that it works")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each model (default 5)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [share(name, "tiny" if given.quick else "full", given.rounds) for name in given.models]
    print(table(("model", "look ms", "step ms", "share"), rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
