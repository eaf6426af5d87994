"""The whole way, once: two real models train at half their activation memory, planned by the service, step for step.

`python -m benchmarks.demo` starts the service on a free port with a SQLite file, captures and profiles a GPT-2 of six
layers and a ResNet50 from transformers configs with random weights, POSTs each at half its plain activation memory,
trains three steps without a plan and by the plan, and prints one table. It then does it again against the same store,
which profiles nothing and is served from the cache; a kernel whose stored time is far off is measured again, and then
the stored plan is answered for other costs. Pictures of memory over the steps go to `demo-out/`.

Exit code 1: a measured peak above the budget, a gradient that differs, or a second run that was not served from the
store.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import remat
from benchmarks.harness.picture import figure, save
from benchmarks.harness.serve import Processes
from benchmarks.models.subject import Subject
from benchmarks.models.zoo import build
from remat.cli.show import percent
from remat.planning.planner import Planner, planner_for
from remat.profiling.measure import differences, forward_backward, outcome, seconds
from remat.settings import settings
from remat_ir import Answer, readable

OUT = Path("demo-out")
STEPS = 3
SEED = 7
MODELS = (("gpt2", "full"), ("resnet50", "large"))


@dataclass
class Result:
    """What one model came to: its plan, bytes above the fixed ones (parameters, buffers and inputs), and seconds."""

    name: str
    plan: Any
    measured: int
    plain_measured: int
    plain_seconds: float
    plan_seconds: float
    differing: list[str]
    wait_seconds: float

    @property
    def budget(self) -> int:
        """The bytes that the plan was asked for."""
        return int(self.plan.answer.budget_bytes) - int(self.plan.step.graph.fixed_bytes)

    @property
    def fine(self) -> bool:
        """Whether the plan keeps its word."""
        return self.measured <= self.budget and not self.differing


def planned(subject: Subject, planner: Planner, time_limit_s: float) -> Any:
    """The module that trains by its plan at half the plain activation memory."""
    return remat.optimize(
        subject.model,
        (),
        subject.inputs,
        budget=remat.Fraction(0.5),
        planner=planner,
        time_limit_s=time_limit_s,
        steps=None,  # a solve that ends when it is no longer worth its time is not stored as done
    )


def compare(subject: Subject, planner: Planner, time_limit_s: float, say: Callable[[str], None]) -> Result:
    """Plan a model, train it without a plan and by the plan, and measure both."""
    start = time.perf_counter()
    module = planned(subject, planner, time_limit_s)
    waited = time.perf_counter() - start
    (plan,) = remat.plans_of(module).plans
    graph, answer = plan.step.graph, plan.answer
    profiled = plan.step.profiled
    say(
        f"  captured, profiled {profiled.signatures - profiled.shared} of {profiled.signatures} kernels "
        f"({profiled.seconds:.0f} s) and planned in {waited:.0f} s"
    )
    say(f"  {graph.ops} ops; {answer.status.value}, gap {percent(answer.gap or 0.0)}, cache {answer.cache}")

    start = time.perf_counter()
    reference = remat.disable(copy.deepcopy(subject.model))
    differing = train_both(module, reference, subject.inputs)
    plain_step = forward_backward(reference, (), subject.inputs)
    plan_step = forward_backward(module, (), subject.inputs)
    plain_seconds, plan_seconds = timed_in_pairs((reference, plain_step), (module, plan_step))
    curves = measured_curve(reference, plain_step), measured_curve(module, plan_step)
    measured = max(curves[1]), max(curves[0])
    result = Result(subject.title, plan, *measured, plain_seconds, plan_seconds, differing, waited)
    say(f"  trained and measured in {time.perf_counter() - start:.0f} s")
    draw(result, *curves)
    return result


def train_both(module: nn.Module, reference: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """Train both for a few steps from the same seeds; the names of gradients, buffers and weights that differ."""
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9) for part in (reference, module)]
    found: list[str] = []
    for number in range(STEPS):
        ended = [outcome(part, forward_backward(part, (), inputs), SEED + number) for part in (reference, module)]
        found += [f"step {number + 1}: {name}" for name in differences(*ended)]
        for optimizer in optimizers:
            optimizer.step()
    weights = zip(reference.parameters(), module.parameters(), strict=True)
    found += [f"weight {i}" for i, (a, b) in enumerate(weights) if not torch.equal(a, b)]
    for part in (reference, module):
        part.zero_grad(set_to_none=True)
    return found


def timed_in_pairs(
    plain: tuple[nn.Module, Callable[[], Any]], plan: tuple[nn.Module, Callable[[], Any]], pairs: int = 5
) -> tuple[float, float]:
    """Least seconds of a step of each, measured side by side: what else the machine does only adds to them."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for times, (module, step) in zip(taken, (plain, plan), strict=True):
            module.zero_grad(set_to_none=True)
            times.append(seconds(step))
    return min(taken[0]), min(taken[1])


def measured_curve(module: nn.Module, step: Callable[[], Any]) -> list[int]:
    """Bytes above the start after each of the allocator's own events, over one step."""
    from remat import _compat

    module.zero_grad(set_to_none=True)
    _compat.start_recording()
    try:
        step()
    finally:
        sizes = _compat.stop_recording()
    module.zero_grad(set_to_none=True)
    return list(accumulate(sizes, initial=0))


def draw(result: Result, plain_seen: list[int], plan_seen: list[int]) -> None:
    """The picture: predicted memory over the plan's steps, and what the allocator saw, each with the budget line."""
    from remat.planning.summary import memory_curve, plain_curve

    plan, graph = result.plan, result.plan.step.graph
    drawn, axes = figure(2, size=(6, 4.5), sharey=True)
    sides = (
        ("predicted, op by op", plain_curve(graph), memory_curve(graph, plan.answer.plan), graph.fixed_bytes),
        ("measured, allocation by allocation", plain_seen, plan_seen, 0),
    )
    for axis, (title, plain, rematerialized, fixed) in zip(axes.flat, sides, strict=True):
        for name, curve, color in (("plain", plain, "0.65"), ("by the plan", rematerialized, "tab:blue")):
            place = [i / max(1, len(curve) - 1) for i in range(len(curve))]
            axis.plot(place, [(size - fixed) / 2**20 for size in curve], color=color, label=name, linewidth=1.1)
        axis.axhline(result.budget / 2**20, color="crimson", linestyle="--", linewidth=1, label="budget")
        axis.set(title=title, xlabel="through the training step")
        axis.grid(alpha=0.25)
    drawn.axes[0].set(ylabel="activation memory in MiB", ylim=(0, None))
    drawn.axes[0].legend(frameon=False)
    drawn.suptitle(result.name)
    OUT.mkdir(exist_ok=True)
    save(drawn, picture_of(result.name))


def picture_of(name: str) -> Path:
    """Where a model's picture goes."""
    return OUT / ("memory-" + "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") + ".png")


def table_of(results: list[Result]) -> Table:
    """The one table: a column for each model."""
    table = Table(title="Three training steps at half the plain activation memory", title_justify="left")
    table.add_column("activation memory, times, gradients")
    for result in results:
        table.add_column(result.name, justify="right")
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("budget", lambda r: readable(r.budget)),
        ("peak predicted", lambda r: readable(r.plan.activation_bytes)),
        ("peak measured", lambda r: readable(r.measured)),
        ("within the budget", lambda r: "yes" if r.measured <= r.budget else "NO"),
        ("plain peak measured", lambda r: readable(r.plain_measured)),
        ("plain step", lambda r: f"{1000 * r.plain_seconds:.0f} ms"),
        ("step by the plan", lambda r: f"{1000 * r.plan_seconds:.0f} ms"),
        ("overhead predicted", lambda r: percent(r.plan.answer.overhead or 0.0)),
        ("overhead measured", lambda r: percent(r.plan_seconds / r.plain_seconds - 1)),
        ("gradients equal, bit for bit", lambda r: "NO" if r.differing else "yes"),
        ("the solve ended", lambda r: _ending(r.plan.answer)),
        ("gap", lambda r: percent(r.plan.answer.gap or 0.0)),
        ("kernels profiled, of all", lambda r: _kernels(r.plan.step.profiled)),
        ("captured, profiled, planned in", lambda r: f"{r.wait_seconds:.1f} s"),
        ("picture", lambda r: str(picture_of(r.name))),
    ]
    for name, text in rows:
        table.add_row(name, *(text(result) for result in results))
    return table


def _ending(answer: Answer) -> str:
    return answer.status.value + (f" ({answer.limit})" if answer.limit else "")


def _kernels(profiled: Any) -> str:
    return f"{profiled.signatures - profiled.shared}, {profiled.signatures}"


def service_on(store: Path, folder: Path) -> Processes:
    """A service on a store that may be kept, and that no key seals, so that a later run can read it."""
    return Processes(folder, f"sqlite:///{store}", seal_key="")


def first_run(url: str, limit_s: float, console: Console) -> list[Result]:
    """Plan, train and measure both models."""
    results = []
    for name, size in MODELS:
        subject = build(name, size)
        console.print(f"{subject.title}: capturing, profiling, planning", highlight=False)
        with tempfile.TemporaryDirectory() as empty:
            planner = planner_for(url, strict=True, given=settings(cache_dir=empty, environ={}))
            results.append(compare(subject, planner, limit_s, lambda text: console.print(text, highlight=False)))
    return results


def second_run(url: str, limit_s: float, console: Console) -> bool:
    """The same problems from a client that knows nothing, against the same store: whether all came from there."""
    fine = True
    for name, size in MODELS:
        subject = build(name, size)
        with tempfile.TemporaryDirectory() as empty:
            planner = planner_for(url, strict=True, given=settings(cache_dir=empty, environ={}))
            start = time.perf_counter()
            (plan,) = remat.plans_of(planned(subject, planner, limit_s)).plans
        profiled = plan.step.profiled.signatures - plan.step.profiled.shared
        known = plan.answer.cache == "hit" and profiled == 0
        # where a kernel or two of a busy moment were measured again
        corrected = plan.answer.cache == "near" and 20 * profiled <= plan.step.profiled.signatures
        served = known or corrected
        fine = fine and served
        source = {"hit": "served from the cache", "near": "the stored plan, for other costs"}
        console.print(
            f"{subject.title}, again: profiled {profiled} of {plan.step.profiled.signatures} kernels, "
            f"{source.get(str(plan.answer.cache), f'cache {plan.answer.cache}')}, "
            f"{time.perf_counter() - start:.1f} s" + ("" if served else "  ← NOT from the store"),
            highlight=False,
        )
    return fine


def quieten() -> None:
    """Send what the libraries print below Python to a file, so that remat's progress line stays one line."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"torch\b")
    OUT.mkdir(exist_ok=True)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with (OUT / "libraries.log").open("wb") as log:
        os.dup2(log.fileno(), 2)


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--store", type=Path, help="the service's SQLite file; kept, so that a later run finds it")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each solve (default 30)")
    parser.add_argument("--once", action="store_true", help="leave the second run out")
    given = parser.parse_args()
    quieten()
    console = Console(width=None if sys.stdout.isatty() else 110)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = (given.store or Path(folder) / "store.sqlite").resolve()
        known = store.exists()
        with service_on(store, Path(folder)) as service:
            service.serve()
            console.print(f"service at {service.url}, store {store}{' (known)' if known else ''}", highlight=False)
            results = first_run(service.url, given.time_limit, console)
        again = True
        if not given.once:
            with service_on(store, Path(folder)) as service:  # another process: what it knows, it has from the store
                service.serve()
                again = second_run(service.url, given.time_limit, console)
    console.print(table_of(results))
    for result in results:
        for name in result.differing[:5]:
            console.print(f"{result.name}: differs in {name}", style="red", highlight=False)
    console.print(f"done in {time.perf_counter() - start:.0f} s", highlight=False)
    return 0 if again and all(result.fine for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
