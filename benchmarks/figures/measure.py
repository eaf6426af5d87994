"""The measurements behind the figures: overhead, largest batches, ratios and times, each row into a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.figures.draw import rows_of
from benchmarks.graphs.architectures import ARCHITECTURES, FLOAT, training_graph
from benchmarks.harness.machine import machine
from remat_ir import Answer, Graph, Problem, plain_peak
from remat_ir.working_set import working_set
from remat_solver import max_batch, solve, sweep
from remat_solver.baselines.shape import linear

Row: TypeAlias = dict[str, Any]

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
ON_LINEAR = ("griewank", "chen-sqrt", "chen-greedy")
ON_OTHERS = ("ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy")
BEST = "auto"
BATCHES = {"vgg16": 256, "vgg19": 256, "mobilenet": 512, "resnet50": 256, "unet": 32, "fcn8": 32, "segnet": 32}
"""The batch sizes of the paper's public graphs."""


class Settings(NamedTuple):
    """Seconds for one solve, budgets per network, and the methods and networks to measure, None for all."""

    seconds: float
    points: int
    methods: frozenset[str] | None = None
    networks: frozenset[str] | None = None

    def wants(self, network: str, method: str) -> bool:
        """Whether a method is to be measured on a network."""
        return (self.networks is None or network in self.networks) and (self.methods is None or method in self.methods)

    def wanted(self, network: str, methods: Iterable[str]) -> list[str]:
        """Those of the methods that are to be measured on a network."""
        return [method for method in methods if self.wants(network, method)]


def budgets_of(graph: Graph, points: int) -> list[int]:
    """Budgets spread evenly from the least that any op needs to the plain peak."""
    least, most = working_set(graph).least_bytes, plain_peak(graph)
    return sorted({least + (most - least) * i // (points - 1) for i in range(points)})


def baselines_of(graph: Graph) -> tuple[str, ...]:
    """Chen's and Griewank's methods on a linear graph, where the generalizations are the same; those on others."""
    assert graph.backward_from is not None
    return ON_LINEAR if linear(graph, graph.backward_from) else ON_OTHERS


def tradeoff(plan: Settings) -> Iterator[Row]:
    """Overhead against budget; costs are a V100 roofline, batches those of the public graphs."""
    for name in ("vgg16", "mobilenet", "unet"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name], "v100")
        yield from _over_budgets(plan, name, graph, (BEST, "checkpoint-all", *baselines_of(graph), "lp-rounding"))


def ratios(plan: Settings) -> Iterator[Row]:
    """Cost in FLOPs of the approximations, and of the best plan known, over budgets."""
    for name in ("mobilenet", "vgg16", "vgg19", "unet", "resnet50"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name])
        yield from _over_budgets(plan, name, graph, (BEST, "ap-sqrt", "ap-greedy", "griewank", "lp-rounding"))


def _over_budgets(plan: Settings, name: str, graph: Graph, methods: Iterable[str]) -> Iterator[Row]:
    budgets = budgets_of(graph, plan.points)
    for method in plan.wanted(name, methods):
        if method == BEST:
            for answer in sweep(graph, budgets, method=BEST, time_limit_s=plan.seconds):
                yield _row(name, graph, answer)
            continue
        for budget in budgets:
            yield _row(name, graph, solve(Problem(graph, budget), method=method, time_limit_s=plan.seconds))


def batches(plan: Settings) -> Iterator[Row]:
    """The largest batch at the cost of one more forward pass in FLOPs, for three readings of 16 GB."""
    readings = (
        ("16 GiB, input charged", 16 * 2**30, True),
        ("16 GB, input charged", 16 * 10**9, True),
        ("16 GB, input free", 16 * 10**9, False),
    )
    for name in ("unet", "fcn8", "segnet", "resnet50", "vgg19", "mobilenet"):
        network = ARCHITECTURES[name]()
        graph, image = training_graph(network, 1), FLOAT * prod(network.shape)
        for reading, memory, charged in readings:
            subject = graph if charged else graph.with_fixed(graph.fixed_bytes - image)
            for method in plan.wanted(name, ("checkpoint-all", *baselines_of(graph), BEST)):
                found = max_batch(
                    subject,
                    memory,
                    batch_bytes=image if charged else 0,
                    method=method,
                    time_limit_s=plan.seconds,
                    total_s=12 * plan.seconds,
                )
                yield {
                    "network": name,
                    "memory": reading,
                    "method": method,
                    "batch": found.batch,
                    "bound": found.bound if method == BEST else "",
                    "overhead": "" if found.answer is None else found.answer.overhead,
                    "seconds": round(found.seconds, 2),
                }


def times(plan: Settings) -> Iterator[Row]:
    """Solve time against graph size, halfway between the least need and the plain peak."""
    small = training_graph(ARCHITECTURES["vgg16"](), 1)
    solve(Problem(small, budgets_of(small, 3)[1]), method=BEST, time_limit_s=120.0)  # compiles, once per installation
    for name in ("vgg16", "unet", "fcn8", "segnet", "mobilenet", "resnet50"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name], "v100")
        budget = budgets_of(graph, 3)[1]
        for method in plan.wanted(name, ("milp", "milp-tight", BEST)):
            yield _row(name, graph, solve(Problem(graph, budget), method=method, time_limit_s=plan.seconds))


def _row(name: str, graph: Graph, answer: Answer) -> Row:
    return {
        "network": name,
        "batch": BATCHES[name],
        "ops": graph.ops,
        "method": answer.method,
        "budget_bytes": answer.budget_bytes,
        "status": answer.status.value,
        "cost": "" if answer.cost_ns is None else answer.cost_ns,
        "bound": "" if answer.bound_ns is None else answer.bound_ns,
        "once": graph.total_cost_ns,
        "peak_bytes": "" if answer.peak_bytes is None else answer.peak_bytes,
        "restricted_to": " ".join(answer.restricted_to),
        "seconds": round(answer.seconds, 3),
    }


MEASURES: dict[str, Callable[[Settings], Iterable[Row]]] = {
    "tradeoff": tradeoff,
    "batches": batches,
    "ratios": ratios,
    "times": times,
}


def measure(name: str, folder: Path, plan: Settings) -> None:
    """Run one measurement and write its CSV row by row, so that an interrupted run leaves what it had."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.part"
    kept = [row for row in rows_of(folder, name) if not plan.wants(row["network"], row["method"])]
    with part.open("w", newline="") as file:
        writer = None
        for count, row in enumerate(chain(kept, MEASURES[name](plan))):
            if writer is None:
                writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            if count >= len(kept):
                print(*row.values(), flush=True)
    if writer is None:
        part.unlink()
        raise SystemExit(f"{name} has no row for these networks and methods; nothing was written")
    part.replace(folder / f"{name}.csv")
    (folder / f"{name}.txt").write_text(f"at most {plan.seconds:g} s a solve, {machine()} at the end\n")
