"""Plans that torch carries out, on whole models: `python -m benchmarks.tags`, restartable, one row a model and budget.

Each row is a training step by plain `torch.compile(backend="aot_eager")` whose joint graph has been tagged: the peak
that was promised and the one that the allocator saw, what is not bitwise equal to the plain step, and the overhead by
the measured costs of the kernels. Rows that are in the file already are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.harness.table import table
from benchmarks.models.zoo import build
from remat import BudgetTooSmall, NothingFound
from remat.profiling.measure import differences, forward_backward, outcome, peak_memory
from remat.tags.passes import TagPass

MODELS = ("gpt2", "bert", "vit", "llama", "convnext", "resnet50", "unet", "t5")
SHARES = (90, 75, 60, 50, 40)
RESULTS = Path(__file__).parent / "results" / "tags.jsonl"
COLUMNS = ("model", "size", "budget", "promised MiB", "measured MiB", "off", "overhead", "again", "not equal")


def run(name: str, size: str, share: int, seconds: float) -> dict[str, Any]:
    """One row: a step of a model within a share of what plain training needs, and the plain step."""
    subject = build(name, size).only_loss()
    plain = copy.deepcopy(subject.model)
    before = outcome(plain, forward_backward(plain, (), subject.inputs))
    tags = TagPass(f"{share}%", planner="local", time_limit_s=seconds)
    row: dict[str, Any] = {"model": name, "size": size, "share": share, "load": round(os.getloadavg()[0], 1)}
    torch._dynamo.reset()
    model = subject.model
    step = forward_backward(
        torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True), (), subject.inputs
    )
    try:
        with functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False), dynamo.patch(**_ignored()):
            after = outcome(model, step)
            model.zero_grad(set_to_none=True)
            measured = peak_memory(step).peak_bytes
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, (BudgetTooSmall, NothingFound)):
            raise
        return row | {"refused": str(error.inner_exception)}
    (found,) = tags.tagged
    fixed = found.joint.graph.fixed_bytes
    return row | {
        "promised": found.peak_bytes - fixed,
        "partition": tags.peaks[0] - fixed,
        "measured": measured,
        "overhead": found.answer.overhead,
        "again": len(found.again),
        "differences": differences(before, after),
        "said": found.answer.message,
    }


def _ignored() -> dict[str, Any]:
    """Warnings of transformers' that Dynamo would split a model at."""
    once = getattr(logging.Logger, "warning_once", None)
    return {"ignore_logging_functions": {*dynamo.ignore_logging_functions, *([] if once is None else [once])}}


def known(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shown(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as a table."""

    def cells(row: dict[str, Any]) -> list[object]:
        start = [row["model"], row["size"], f"{row['share']} %"]
        if "refused" in row:
            return [*start, *["–"] * (len(COLUMNS) - len(start) - 1), "no plan"]
        promised, measured = row["promised"], row["measured"]
        sizes = [f"{promised / 2**20:.2f}", f"{measured / 2**20:.2f}", f"{100 * (measured / promised - 1):+.2f} %"]
        unequal = ", ".join(row["differences"][:2]) or "–"
        return [*start, *sizes, f"{100 * row['overhead']:.2f} %", row["again"], unequal]

    return table(COLUMNS, map(cells, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is missing of the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, help="percent of what plain training needs")
    parser.add_argument("--size", default="full", help="of the models: tiny, small, full")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    rows = known(given.output)
    there = {(row["model"], row["size"], row["share"]) for row in rows}
    for name in given.models:
        for share in sorted(given.shares, reverse=True):
            if (name, given.size, share) in there:
                continue
            rows.append(run(name, given.size, share, given.seconds))
            with given.output.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(shown(rows))


if __name__ == "__main__":
    main()
