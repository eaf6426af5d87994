"""Plans under Inductor and what else there is: `python -m benchmarks.training.inductor --models gpt2 --out FOLDER`.

Each model is trained for a step by plain Inductor, by `activation_memory_budget` at three settings, by per-block
checkpoints under Inductor, and by remat at two budgets, in one process; steps are timed in turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.harness.machine import machine
from benchmarks.harness.table import table as markdown
from benchmarks.models.zoo import build
from benchmarks.tags.record import mib
from remat.profiling import measure

MODELS = {"gpt2": "gpt2", "bert": "bert", "vit": "vit", "resnet": "dropout_resnet", "unet": "dropout_unet"}
"""By the name in the table, the model in the zoo, each in its small size and with dropout 0.1."""

SETTINGS = (0.7, 0.5, 0.3)
"""Of `activation_memory_budget`: shares of the bytes saved between the passes, not of the peak."""


@dataclass
class Row:
    """One way of training one model.

    Attributes:
        peak_bytes: measured above parameters, buffers and inputs.
        predicted_bytes, budget_bytes: on the same base; of remat only.
        time_ratio: CPU time of a step over plain Inductor's, the least of all turns; None: cut short before that.
        gradient_error: the largest relative error of a parameter's gradient against plain Inductor's, seeds equal;
            None where equal bit for bit.
        generator: whether the generator's state after the step is plain Inductor's.
        compile_s: seconds of the first step.
    """

    model: str
    way: str
    peak_bytes: int
    predicted_bytes: int | None
    budget_bytes: int | None
    time_ratio: float | None
    gradient_error: float | None
    generator: bool
    tries: int | None
    compile_s: float


Backend = Callable[[Any, Any], Any]


def with_setting(share: float) -> Backend:
    """Inductor with `activation_memory_budget` at a share."""
    import torch._functorch.config as config
    from torch._inductor.compile_fx import compile_fx

    def backend(module: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=share):
            return compile_fx(module, inputs)

    return backend


def compare(
    name: str, limit: float, turns: int, shares: Sequence[float], settings: Sequence[float] = SETTINGS
) -> Iterator[list[Row]]:
    """All ways of training one model; remat's budgets are shares of plain Inductor's measured peak.

    Yields what is known so far: peaks and gradients after each way, the times at the end.
    """
    subject = build(MODELS[name], "small").only_loss()
    model, batch, checkpointed = subject.model, subject.inputs, subject.with_checkpoints().model
    ways: dict[str, tuple[nn.Module, Any]] = {"plain Inductor": (model, with_setting(1.0))}
    ways |= {f"activation_memory_budget {share}": (model, with_setting(share)) for share in settings}
    ways["checkpoint each block"] = (checkpointed, with_setting(1.0))
    rows: dict[str, Row] = {}
    steps: dict[str, tuple[nn.Module, Callable[[], Any]]] = {}
    plain: measure.Outcome | None = None
    for way, (module, backend) in ways.items():
        rows[way], found, steps[way] = _run(name, way, module, batch, backend, plain)
        plain = plain or found
        yield list(rows.values())
    least = rows["plain Inductor"].peak_bytes
    for share in shares:
        budget = remat.ActivationBytes(int(share * least))
        backend = remat.backend(budget, planner="local", inner="inductor", time_limit_s=limit, max_gap=0.005)
        way = f"remat, {share:.0%} of plain Inductor's peak"
        try:
            rows[way], _, steps[way] = _run(name, way, model, batch, backend, plain)
        except Exception as error:
            print(f"{name}, {way}: {str(error).splitlines()[-1] if str(error) else error!r}"[:300], flush=True)
            continue
        (carried,) = backend.carried[-1:]
        rows[way].predicted_bytes = carried.activation_bytes
        rows[way].budget_bytes = carried.budget_bytes - carried.graph.fixed_bytes
        rows[way].tries = len(carried.tries)
        yield list(rows.values())
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(turns):
        for way, (module, step) in steps.items():
            best[way] = min(best[way], measure.seconds(step, clock=time.process_time))
            module.zero_grad(set_to_none=True)
    for way, row in rows.items():
        row.time_ratio = best[way] / best["plain Inductor"]
    yield list(rows.values())


def _run(
    name: str, way: str, module: nn.Module, batch: Mapping[str, Any], backend: Any, plain: measure.Outcome | None
) -> tuple[Row, measure.Outcome, tuple[nn.Module, Callable[[], Any]]]:
    before = {key: value.clone() for key, value in module.state_dict().items()}
    run = torch.compile(module, backend=backend, fullgraph=way != "checkpoint each block", dynamic=False)
    step = measure.forward_backward(run, (), batch)
    began = time.perf_counter()
    found = measure.outcome(module, step)
    seconds = time.perf_counter() - began
    module.load_state_dict(before)
    module.zero_grad(set_to_none=True)
    peak = measure.peak_memory(step).peak_bytes
    module.zero_grad(set_to_none=True)
    error = None if plain is None else _error(plain, found)
    equal = plain is None or torch.equal(plain.generator, found.generator)
    row = Row(name, way, peak, None, None, None, error, equal, None, seconds)
    print(f"{name}, {way}: {peak / 2**20:.2f} MiB, {seconds:.0f} s", flush=True)
    return row, found, (module, step)


def _error(plain: measure.Outcome, other: measure.Outcome) -> float | None:
    worst: float | None = None
    for name, expected in plain.gradients.items():
        found = other.gradients[name]
        if expected is None or found is None or torch.equal(expected, found):
            continue
        size = float(expected.norm())
        worst = max(worst or 0.0, float((expected - found).norm()) / size if size else float("inf"))
    return worst


def table(rows: Sequence[Row]) -> str:
    """The rows of all models as a Markdown table."""
    head = ["model", "way", "peak MiB", "budget", "predicted", "of plain", "step time", "gradients", "generator"]
    body = []
    plain = {row.model: row.peak_bytes for row in rows if row.way == "plain Inductor"}
    for row in rows:
        cells = [row.model, row.way, mib(row.peak_bytes), mib(row.budget_bytes), _predicted(row)]
        cells += [f"{row.peak_bytes / plain[row.model]:.2f}", _ratio(row.time_ratio), _equal(row)]
        cells.append("equal" if row.generator else "**differs**")
        body.append(cells)
    return markdown(head, body)


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _predicted(row: Row) -> str:
    if row.predicted_bytes is None:
        return "–"
    return f"{mib(row.predicted_bytes)} ({row.peak_bytes / row.predicted_bytes - 1:+.1%})"


def _equal(row: Row) -> str:
    if row.gradient_error is None:
        return "equal"
    return f"**wrong: {row.gradient_error:.1g}**" if row.gradient_error > 1e-3 else f"{row.gradient_error:.1g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models asked for, and print the table of all that the folder holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=sorted(MODELS), choices=sorted(MODELS))
    parser.add_argument("--out", default="inductor-bench", help="folder for one file a model")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that the planner has for each try")
    parser.add_argument("--turns", type=int, default=9, help="timed steps of each way")
    parser.add_argument(
        "--settings", type=float, nargs="*", default=SETTINGS, help="of activation_memory_budget; none leaves it out"
    )
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.9, 0.75], help="shares of plain Inductor's peak")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    _one_entry_each()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        load = machine().load
        torch._dynamo.reset()
        for rows in compare(name, options.limit, options.turns, options.budgets, options.settings):
            text = json.dumps({"load": load, "rows": [asdict(row) for row in rows]}, indent=1)
            (folder / f"{name}.json").write_text(text)
    found = {name: json.loads(path.read_text()) for name in MODELS if (path := folder / f"{name}.json").exists()}
    print(table([Row(**row) for name in found for row in found[name]["rows"]]))
    loads = ", ".join(f"{name} {found[name]['load']:.1f}" for name in found)
    print(f"\n{machine('torch')}; one thread; load average before each model: {loads}")
    return 0


def _one_entry_each() -> None:
    """Each way of a model is compiled anew, its plan too; only compiled kernels come from Inductor's caches."""
    import logging

    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    dynamo.recompile_limit = 64
    dynamo.ignore_logging_functions = {
        getattr(logging.Logger, name)
        for name in ("debug", "info", "warning", "warning_once")
        if hasattr(logging.Logger, name)
    }
    functorch.enable_autograd_cache = False
    inductor.fx_graph_cache = False
    inductor.compile_threads = 1


if __name__ == "__main__":
    raise SystemExit(main())
