"""The measurements behind the figures: overhead, largest batches, ratios and times, each row into a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import prod
from pathlib import Path

from benchmarks.figures.captured import profiles, trained
from benchmarks.figures.panels import rows_of
from benchmarks.figures.solves import BEST, Row, Settings, answers, baselines_of, budgets_of, row_of
from benchmarks.graphs.architectures import ARCHITECTURES, FLOAT, training_graph
from benchmarks.harness.machine import machine
from remat_ir import Graph, Problem
from remat_solver import max_batch, solve

FOLDER = Path(__file__).parents[1] / "results" / "figures"
BATCHES = {"vgg16": 256, "vgg19": 256, "mobilenet": 512, "resnet50": 256, "unet": 32, "fcn8": 32, "segnet": 32}
"""The batch sizes of the paper's public graphs."""


def tradeoff(plan: Settings) -> Iterator[Row]:
    """Overhead against budget; costs are a V100 roofline, batches those of the public graphs."""
    for name in ("vgg16", "mobilenet", "unet"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name], "v100")
        methods = (BEST, "checkpoint-all", *baselines_of(graph), "lp-rounding")
        yield from _over_budgets(plan, name, graph, methods)


def ratios(plan: Settings) -> Iterator[Row]:
    """Cost in FLOPs of the approximations, and of the best plan known, over budgets."""
    for name in ("mobilenet", "vgg16", "vgg19", "unet", "resnet50"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name])
        yield from _over_budgets(plan, name, graph, (BEST, "ap-sqrt", "ap-greedy", "griewank", "lp-rounding"))


def _over_budgets(plan: Settings, name: str, graph: Graph, methods: Iterable[str]) -> Iterator[Row]:
    budgets = budgets_of(graph, plan.points)
    for answer in answers(graph, budgets, plan.wanted(name, methods), plan.seconds):
        yield row_of(name, BATCHES[name], graph, answer)


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
            answer = solve(Problem(graph, budget), method=method, time_limit_s=plan.seconds)
            yield row_of(name, BATCHES[name], graph, answer)


MEASURES: dict[str, Callable[[Settings], Iterable[Row]]] = {
    "tradeoff": tradeoff,
    "profiles": profiles,
    "trained": trained,
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
