"""Three models under Inductor, tagged at three budgets: measured peaks next to promised ones, gradients next to plain.

The plan is for the kernels before Inductor fuses them, so that its promise is an upper bound; both are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as config
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.compile_fx import compile_fx

from benchmarks.harness.steps import Steps
from benchmarks.harness.table import table
from benchmarks.models.zoo import build
from benchmarks.tags.record import RESULTS, completed, mib, percent
from remat import ActivationBytes, BudgetTooSmall, NothingFound
from remat.capture.refused import logging_functions
from remat.profiling.measure import Outcome
from remat.tags.passes import TagPartitioner

MODELS = ("gpt2", "bert", "vit")
SHARES = (80, 65, 50)
COLUMNS = ("model", "way", "promised MiB", "measured MiB", "off", "largest error of a gradient", "generator", "masks")


def run(name: str, size: str, shares: Iterable[int], seconds: float) -> dict[str, dict[str, Any]]:
    """Plain Inductor and the tagged plans of one model: peaks, and gradients from the same seed."""
    subject = build(name, size).only_loss()
    model, found = subject.model, {}
    steps, plain = Steps(model, subject.inputs), 0
    for share in (None, *sorted(shares, reverse=True)):
        tags = None if share is None else TagPartitioner(
            ActivationBytes(plain * share // 100), planner="local", time_limit_s=seconds
        )  # fmt: skip
        # a graph that an earlier run left in Inductor's cache would have no plan to compare with
        patches = {"force_disable_caches": True} | ({} if tags is None else {"custom_partitioner_fn": tags})

        def backend(module: Any, inputs: Any, patches: dict[str, Any] = patches) -> Any:
            with config.patch(patches):
                return compile_fx(module, inputs)

        call = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        way = "plain Inductor" if share is None else f"{share} %"
        try:
            left, unequal, peak = steps.tried(way, model, call)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, (BudgetTooSmall, NothingFound)):
                raise
            found[way] = {"refused": str(error.inner_exception)}
            continue
        plain = plain or peak
        row: dict[str, Any] = {"measured": peak, "error": error_of(steps.first, left), "loss": "loss" not in unequal}
        row["generator"] = not any(text.startswith("generator") for text in unequal)
        if tags is not None:
            planned = tags.tagged[-1]
            row |= {"promised": planned.peak_bytes - planned.joint.graph.fixed_bytes, "said": planned.answer.message}
        found[way] = row
        print(f"  {way}: {mib(peak)} MiB", flush=True)
    return found


def error_of(plain: Outcome, other: Outcome) -> float:
    """The largest difference of a gradient, over the norm of that gradient.

    The gradient of a key's bias is zero but for rounding: what is below a thousandth of the largest norm counts so.
    """
    expected = {name: gradient for name, gradient in plain.gradients.items() if gradient is not None}
    least = max((float(gradient.norm()) for gradient in expected.values()), default=0.0) / 1000
    worst = 0.0
    for name, gradient in expected.items():
        found = other.gradients[name]
        if found is not None and least:
            worst = max(worst, float((gradient - found).norm()) / max(float(gradient.norm()), least))
    return worst


def options(parser: argparse.ArgumentParser) -> None:
    """What may be asked for."""
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, help="percent of plain Inductor's peak")
    parser.add_argument("--size", default="small", help="of the models: tiny, small, full")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each plan")
    parser.add_argument("--output", type=Path, default=RESULTS / "tags-inductor.jsonl")


def made(given: argparse.Namespace) -> str:
    """Make what is missing of the table."""
    torch.set_num_threads(1)

    def ways(name: str) -> dict[str, Any]:
        with dynamo.patch(ignore_logging_functions=set(logging_functions(build(name, given.size).model))):
            return run(name, given.size, given.shares, given.seconds)

    return shown(completed(given, ways))


def shown(rows: Iterable[dict[str, Any]]) -> str:
    """The table. Masks are those of plain Inductor where no gradient is off by more than rounding."""
    cells = []
    for row in rows:
        for name, way in row["ways"].items():
            if "refused" in way:
                cells.append([row["model"], name, *["–"] * 5, "no plan"])
                continue
            promised = way.get("promised")
            off = None if promised is None else way["measured"] / promised - 1
            masks = "equal" if way["error"] < 1e-4 and way["loss"] else "**differ**"
            generator = "equal" if way["generator"] else "**differs**"
            cells.append(
                [row["model"], name, mib(promised), mib(way["measured"]), percent(off), f"{way['error']:.1e}",
                 generator, masks]
            )  # fmt: skip
    return table(COLUMNS, cells)
