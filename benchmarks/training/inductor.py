"""Plans under Inductor and what else there is: `python -m benchmarks.training.inductor --models gpt2 --out FILE`.

Each model is trained for a step by plain Inductor, by `activation_memory_budget` at three settings, by per-block
checkpoints under Inductor, and by remat at two budgets, in one process; steps are timed in turns. A model that has its
line in the file is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.compile_fx import compile_fx

import remat
from benchmarks.harness.steps import Steps
from benchmarks.harness.table import table
from benchmarks.models.zoo import build
from benchmarks.tags.inductor import error_of
from benchmarks.tags.record import completed, mib
from remat.capture.refused import logging_functions

MODELS = {"gpt2": "gpt2", "bert": "bert", "vit": "vit", "resnet": "dropout_resnet", "unet": "dropout_unet"}
"""By the name in the table, the model in the zoo, each in its small size and with dropout 0.1."""

SETTINGS = (0.7, 0.5, 0.3)
"""Of `activation_memory_budget`: shares of the bytes saved between the passes, not of the peak."""

PLAIN, CHECKPOINTS = "plain Inductor", "checkpoint each block"
COLUMNS = ("model", "way", "peak MiB", "budget", "predicted", "of plain", "step time", "gradients", "generator")


def with_setting(share: float) -> Callable[[Any, Any], Any]:
    """Inductor with `activation_memory_budget` at a share."""

    def backend(module: Any, inputs: Any) -> Any:
        with functorch.patch(activation_memory_budget=share):
            return compile_fx(module, inputs)

    return backend


def compare(name: str, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All ways of training one model: peaks above parameters, buffers and inputs, gradients next to plain Inductor's
    from the same seed, and the CPU seconds of a step, the least of all turns.

    remat's budgets are shares of plain Inductor's measured peak; what it predicts is on the same base.
    """
    subject = build(MODELS[name], given.size).only_loss()
    model, steps = subject.model, Steps(subject.model, subject.inputs)
    rows: dict[str, dict[str, Any]] = {}

    def enter(way: str, owner: nn.Module, backend: Any) -> dict[str, Any]:
        run = torch.compile(owner, backend=backend, fullgraph=way != CHECKPOINTS, dynamic=False)
        left, unequal, peak = steps.tried(way, owner, run)
        equal = not any(text.startswith("gradient") for text in unequal)
        rows[way] = {"peak": peak, "error": None if equal else error_of(steps.first, left)}
        rows[way]["generator"] = not any(text.startswith("generator") for text in unequal)
        print(f"  {way}: {mib(peak)} MiB", flush=True)
        return rows[way]

    enter(PLAIN, model, with_setting(1.0))
    for share in given.settings:
        enter(f"activation_memory_budget {share}", model, with_setting(share))
    enter(CHECKPOINTS, subject.with_checkpoints().model, with_setting(1.0))
    for share in given.budgets:
        budget = remat.ActivationBytes(int(share * rows[PLAIN]["peak"]))
        backend = remat.backend(budget, planner="local", inner="inductor", time_limit_s=given.limit, max_gap=0.005)
        way = f"remat, {share:.0%} of plain Inductor's peak"
        try:
            row = enter(way, model, backend)
        except Exception as error:
            print(f"  {way}: {str(error).splitlines()[-1] if str(error) else error!r}"[:300], flush=True)
            continue
        carried = backend.carried[-1]
        row |= {"predicted": carried.activation_bytes, "budget": carried.budget_bytes - carried.graph.fixed_bytes}
    for _ in range(given.turns):
        for way, row in rows.items():
            row["seconds"] = min(steps.seconds(way), row.get("seconds", float("inf")))
    return rows


def shown(rows: Iterable[dict[str, Any]]) -> str:
    """The table of all models, and what each was measured on."""
    body, machines = [], []
    for row in rows:
        plain = row["ways"][PLAIN]
        machines.append(f"{row['model']}: {row['machine']}")
        for name, way in row["ways"].items():
            predicted, error = way.get("predicted"), way["error"]
            off = "" if predicted is None else f" ({way['peak'] / predicted - 1:+.1%})"
            wrong = "equal" if error is None else f"**wrong: {error:.1g}**" if error > 1e-3 else f"{error:.1g}"
            cells = [row["model"], name, mib(way["peak"]), mib(way.get("budget")), f"{mib(predicted)}{off}"]
            cells += [f"{way['peak'] / plain['peak']:.2f}", f"{way['seconds'] / plain['seconds']:.2f}", wrong]
            body.append([*cells, "equal" if way["generator"] else "**differs**"])
    return "\n".join([table(COLUMNS, body), "", *machines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models asked for, and print the table of all that the file holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=sorted(MODELS), choices=sorted(MODELS))
    parser.add_argument("--out", dest="output", type=Path, default=Path("inductor-bench.jsonl"), help="a line a model")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that the planner has for each try")
    parser.add_argument("--turns", type=int, default=9, help="timed steps of each way")
    parser.add_argument(
        "--settings", type=float, nargs="*", default=SETTINGS, help="of activation_memory_budget; none leaves it out"
    )
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.9, 0.75], help="shares of plain Inductor's peak")
    parser.set_defaults(size="small")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)

    def ways(name: str) -> dict[str, Any]:
        more = {"ignore_logging_functions": set(logging_functions(build(MODELS[name], given.size).model))}
        # each way is compiled anew, its plan too; only compiled kernels come from Inductor's caches
        with (
            dynamo.patch(recompile_limit=64, **more),
            functorch.patch(enable_autograd_cache=False),
            inductor.patch(fx_graph_cache=False, compile_threads=1),
        ):
            return compare(name, given)

    print(shown(completed(given, ways)))


if __name__ == "__main__":
    main()
