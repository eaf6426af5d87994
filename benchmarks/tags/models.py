"""Eight models by plain `torch.compile(backend="aot_eager")`, tagged at five budgets, next to what torch offers.

A model is one line of the file: plain `aot_eager`, torch's own budget, per-block checkpoints and selective ones, each
with its measured peak; the tagged plan at shares of the plain peak, and at the peaks of those three. Gradients, buffers
and generators are compared with `aot_eager`'s bit for bit; steps are timed in turns, in processor time of one thread.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.harness.steps import Steps
from benchmarks.harness.table import table
from benchmarks.models.zoo import SEED, build
from benchmarks.tags.record import RESULTS, completed, mib, percent
from benchmarks.training.peers import checkpointed, compiled, selective_contexts
from remat import ActivationBytes, BudgetTooSmall, NothingFound
from remat.capture.refused import logging_functions
from remat.tags.passes import TagPass

MODELS = ("gpt2", "bert", "vit", "llama", "convnext", "resnet50", "unet", "t5")
SHARES = (90, 75, 60, 50, 40)
PEERS = ("amb 0.5", "selective", "checkpoint")
COLUMNS = ("model", "way", "promised MiB", "measured MiB", "off", "predicted time", "time", "again", "not equal")


def tagged(model: nn.Module, peak: int, seconds: float) -> tuple[Callable[..., Any], TagPass]:
    """A model under `aot_eager`, its joint graph tagged for a peak above parameters and inputs."""
    tags = TagPass(ActivationBytes(peak), planner="local", time_limit_s=seconds)

    def backend(module: Any, inputs: Any) -> Any:
        with functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False):
            return aot_eager(module, inputs)

    return torch.compile(model, backend=backend, dynamic=False, fullgraph=True), tags


class Bench:
    """The measurement of one model."""

    def __init__(self, name: str, size: str, seconds: float) -> None:
        self.subject = build(name, size).only_loss()
        self.seconds = seconds
        self.steps = Steps(self.subject.model, self.subject.inputs)
        self.rows: dict[str, dict[str, Any]] = {}

    def enter(self, name: str, owner: nn.Module, call: Callable[..., Any], **row: Any) -> dict[str, Any]:
        """Run a way twice: for what it leaves behind, and for its peak."""
        _, unequal, peak = self.steps.tried(name, owner, call)
        self.rows[name] = row | {"measured": peak, "unequal": unequal}
        print(f"  {name}: {mib(peak)} MiB, {len(unequal)} results are not aot_eager's", flush=True)
        return self.rows[name]

    def plan(self, name: str, peak: int) -> None:
        """Enter the tagged plan for a peak, or why there is none."""
        call, tags = tagged(self.subject.model, peak, self.seconds)
        start = time.perf_counter()
        try:
            row = self.enter(name, self.subject.model, call, budget=peak)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, (BudgetTooSmall, NothingFound)):
                raise
            row = {"budget": peak, "refused": str(error.inner_exception)}
            self.rows[name] = row
            print(f"  {name}: {row['refused']}"[:160], flush=True)
            return
        found, fixed = tags.tagged[-1], tags.tagged[-1].joint.graph.fixed_bytes
        row |= {"promised": found.peak_bytes - fixed, "partition": tags.peaks[-1] - fixed, "again": len(found.again)}
        row |= {"overhead": found.answer.overhead, "bound_ns": found.answer.bound_ns, "cost_ns": found.answer.cost_ns}
        row |= {"said": found.answer.message, "first_step_s": round(time.perf_counter() - start, 1)}

    def time(self, rounds: int) -> None:
        """Time all ways in turns, each round in another order."""
        draw, names = random.Random(SEED), [name for name, row in self.rows.items() if "measured" in row]
        for number in range(rounds + 1):
            for name in draw.sample(names, len(names)):
                took = self.steps.seconds(name)
                if number:  # the first round warms caches
                    self.rows[name].setdefault("seconds", []).append(round(took, 4))

    def run(self, shares: Iterable[int], rounds: int) -> dict[str, Any]:
        """Everything about the model."""
        subject = self.subject
        more = {"ignore_logging_functions": set(logging_functions(subject.model)), "recompile_limit": 64}
        with dynamo.patch(**more):
            plain = self.enter("aot_eager", subject.model, compiled(subject, None))["measured"]
            for name in PEERS:
                made = {"amb 0.5": lambda: compiled(subject, 0.5), "checkpoint": lambda: checkpointed(subject)}.get(
                    name, lambda: checkpointed(subject, selective_contexts)
                )()
                self.enter(name, made.__dict__["owner"], made)
            for share in sorted(shares, reverse=True):
                self.plan(f"{share} %", plain * share // 100)
            for name in PEERS:
                if self.rows[name]["measured"] < plain:
                    self.plan(f"at {name}", self.rows[name]["measured"])
            self.time(rounds)
        return self.rows


def options(parser: argparse.ArgumentParser) -> None:
    """What may be asked for."""
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, help="percent of the plain peak")
    parser.add_argument("--size", default="full", help="of the models: tiny, small, full")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "tags-models.jsonl")


def made(given: argparse.Namespace) -> str:
    """Make what is missing of the table."""
    torch.set_num_threads(1)
    return shown(completed(given, lambda name: Bench(name, given.size, given.seconds).run(given.shares, given.rounds)))


def shown(rows: Iterable[dict[str, Any]]) -> str:
    """The table, and under it what the plans promise and do not keep."""
    cells, broken = [], []
    for row in rows:
        ways = row["ways"]
        for name, way in ways.items():
            start: list[object] = [row["model"], name]
            if "refused" in way:
                cells.append([*start, *["–"] * 6, "no plan"])
                continue
            promised, measured = way.get("promised"), way["measured"]
            off = None if promised is None else measured / promised - 1
            unequal = ", ".join(way["unequal"][:2]) or "–"
            taken = _ratio(way, ways["aot_eager"])
            cells.append(
                [*start, mib(promised), mib(measured), percent(off), percent(way.get("overhead")), taken,
                 way.get("again", "–"), unequal]
            )  # fmt: skip
            if off is not None and not -0.02 <= off <= 0:
                broken.append(f"{row['model']} {name}: the peak is {percent(off)} off")
            if promised is not None and way["unequal"]:
                broken.append(f"{row['model']} {name}: not aot_eager's: {unequal}")
        broken += _not_monotone(row)
    return table(COLUMNS, cells) + "\n" + "\n".join(broken or ["Every promise is kept."]) + "\n"


def _ratio(way: dict[str, Any], plain: dict[str, Any]) -> str:
    """The median over the rounds of a way's time over that of `aot_eager` in the same round."""
    pairs = sorted(a / b for a, b in zip(way.get("seconds", ()), plain.get("seconds", ()), strict=False) if b)
    return f"{pairs[len(pairs) // 2]:.2f}" if pairs else "–"


def _not_monotone(row: dict[str, Any]) -> list[str]:
    """Budgets at which a smaller one measured more, or promised less time."""
    plans = [(way["budget"], way) for way in row["ways"].values() if "promised" in way]
    plans.sort(key=lambda pair: pair[0])
    found = []
    for (_, small), (_, large) in itertools.pairwise(plans):
        if small["measured"] > large["measured"] or small["overhead"] < large["overhead"]:
            found.append(f"{row['model']}: not monotone between {mib(small['budget'])} and {mib(large['budget'])} MiB")
    return found
