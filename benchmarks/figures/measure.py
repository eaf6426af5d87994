"""The measurements behind the figures in pieces: overhead, largest batches, ratios and times, kept as CSV files.

A piece says which methods are asked, at which budgets and for how long; its rows are those of the answers.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.figures.draw import rows_of
from benchmarks.graphs.architectures import ARCHITECTURES, FLOAT, training_graph
from benchmarks.harness.machine import Machine, commit, machine
from benchmarks.harness.table import csv_text
from remat_ir import Answer, Graph, Problem, plain_peak
from remat_ir.graph import working_set
from remat_solver import max_batch, solve, sweep
from remat_solver.baselines.heuristics import BASELINES, BaselineOptions, linear

Row: TypeAlias = dict[str, Any]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "figures"
BATCHES = {"vgg16": 256, "vgg19": 256, "mobilenet": 512, "resnet50": 256, "unet": 32, "fcn8": 32, "segnet": 32}
"""The batch sizes of the paper's public graphs."""
READINGS = (
    ("16 GiB, input charged", 16 * 2**30, True),
    ("16 GB, input charged", 16 * 10**9, True),
    ("16 GB, input free", 16 * 10**9, False),
)
"""Of the paper's "16 GB": its words, bytes, and whether the input batch counts."""
ON_LINEAR = ("griewank", "chen-sqrt", "chen-greedy")
ON_OTHERS = ("ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy")
FORMULAS = ("checkpoint-all", *ON_LINEAR, *ON_OTHERS)
"""Methods that solve nothing, and take seconds."""
BEST = "auto"
PROGRAMS = ("milp", "milp-tight", "lp-rounding")
"""Methods that hand the paper's program, or one of the same space, to an engine, which runs on one core."""


class Settings(NamedTuple):
    """Seconds of each kind of solve, budgets a network, and the methods and networks to measure, None for all.

    Attributes:
        seconds: of a solve by `auto`, which runs on two cores.
        program_s: of a solve of the paper's program, or of its relaxation.
        long_s: of the paper's program for ResNet50 (Checkmate, Section 5.1: 3,600 s).
    """

    seconds: float = 30.0
    points: int = 6
    methods: frozenset[str] | None = None
    networks: frozenset[str] | None = None
    program_s: float = 600.0
    long_s: float = 3600.0

    def wants(self, network: str, method: str) -> bool:
        """Whether a method is to be measured on a network."""
        return (self.networks is None or network in self.networks) and (self.methods is None or method in self.methods)

    def limit_s(self, method: str) -> float:
        """The time limit of one solve."""
        return self.program_s if method in PROGRAMS else self.seconds


class Piece(NamedTuple):
    """A part of a measurement that is run and kept by itself: one solve, or solves that help one another.

    Attributes:
        part: what tells it from others of the same network and method.
        limit_s: the most that its solves may take.
        cores: how many it keeps busy.
        rows: runs it.
    """

    network: str
    method: str
    part: str
    limit_s: float
    cores: int
    rows: Callable[[], Iterable[Row]]

    @property
    def name(self) -> str:
        """For a file and the command line."""
        return "-".join(filter(None, (self.network, self.method, self.part)))


def budgets_of(graph: Graph, points: int) -> list[int]:
    """Budgets spread evenly from the least that any op needs to the plain peak."""
    least, most = working_set(graph).least_bytes, plain_peak(graph)
    return sorted({least + (most - least) * i // (points - 1) for i in range(points)})


def baselines_of(graph: Graph) -> tuple[str, ...]:
    """Chen's and Griewank's methods on a linear graph, where the generalizations are the same; those on others."""
    assert graph.backward_from is not None
    return ON_LINEAR if linear(graph, graph.backward_from) else ON_OTHERS


def accountings(method: str) -> tuple[str, ...]:
    """The ways to count a method's memory: a baseline's as its paper does, too, where that is another."""
    return ("", "paper") if method in BASELINES and BASELINES[method].options is BaselineOptions else ("",)


def options_for(freeing: str) -> Mapping[str, object]:
    """The options of one way to count."""
    return {"freeing": freeing} if freeing else {}


def answers(graph: Graph, budgets: Sequence[int], method: str, seconds: float, freeing: str = "") -> Iterable[Answer]:
    """A method's answer at each budget; those of auto help one another."""
    if method == BEST:
        return sweep(graph, budgets, method=BEST, time_limit_s=seconds)
    return (
        solve(Problem(graph, budget), method=method, time_limit_s=seconds, options=options_for(freeing))
        for budget in budgets
    )


def pieces_of(
    plan: Settings, name: str, batch: int, graph: Graph, budgets: Sequence[int], methods: Iterable[str]
) -> Iterable[Piece]:
    """A piece for each method, of a program one for each budget."""
    for method in methods:
        groups = [[budget] for budget in budgets] if method in PROGRAMS else [list(budgets)]
        for at, some in enumerate(groups):
            part, limit_s = str(at) if len(groups) > 1 else "", plan.limit_s(method)
            rows = partial(_rows, name, batch, graph, some, method, limit_s)
            most_s = limit_s if method in FORMULAS else len(some) * limit_s
            yield Piece(name, method, part, most_s, 2 if method == BEST else 1, rows)


def _rows(name: str, batch: int, graph: Graph, budgets: Sequence[int], method: str, limit_s: float) -> Iterable[Row]:
    for freeing in accountings(method):
        for answer in answers(graph, budgets, method, limit_s, freeing):
            yield {**row_of(name, batch, graph, answer), "freeing": freeing, "limit_s": limit_s}


def row_of(name: str, batch: int, graph: Graph, answer: Answer) -> Row:
    """What a file holds of an answer."""
    return {
        "network": name,
        "batch": batch,
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
        "ended": answer.limit or "",
    }


def tradeoff(plan: Settings) -> Iterator[Piece]:
    """Overhead against budget; costs are a V100 roofline, batches those of the public graphs."""
    for name in ("vgg16", "mobilenet", "unet"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name], "v100")
        methods = (BEST, "milp", "checkpoint-all", *baselines_of(graph), "lp-rounding")
        yield from pieces_of(plan, name, BATCHES[name], graph, budgets_of(graph, plan.points), methods)


def ratios(plan: Settings) -> Iterator[Piece]:
    """Cost in FLOPs of the approximations, and of the best plan known, over budgets."""
    for name in ("mobilenet", "vgg16", "vgg19", "unet", "resnet50"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name])
        methods = (BEST, "ap-sqrt", "ap-greedy", "griewank", "lp-rounding")
        yield from pieces_of(plan, name, BATCHES[name], graph, budgets_of(graph, plan.points), methods)


def times(plan: Settings) -> Iterator[Piece]:
    """Solve time against graph size, halfway between the least need and the plain peak; of ResNet50 three budgets."""
    for name in ("vgg16", "unet", "fcn8", "segnet", "mobilenet", "resnet50"):
        graph = training_graph(ARCHITECTURES[name](), BATCHES[name], "v100")
        halfway = budgets_of(graph, 3)[1]
        for method in ("milp", "milp-tight", BEST):
            long = name == "resnet50" and method == "milp"
            mine = plan._replace(program_s=plan.long_s) if long else plan
            budgets = budgets_of(graph, 5)[1:4] if long else [halfway]
            yield from pieces_of(mine, name, BATCHES[name], graph, budgets, (method,))


def batches(plan: Settings) -> Iterator[Piece]:
    """The largest batch at the cost of one more forward pass in FLOPs, for three readings of 16 GB.

    The paper's program is asked for one of them: each of its searches may take an hour.
    """
    for name in ("unet", "fcn8", "segnet", "resnet50", "vgg19", "mobilenet"):
        network = ARCHITECTURES[name]()
        graph, image = training_graph(network, 1), FLOAT * prod(network.shape)
        for at, reading in enumerate(READINGS):
            methods = ("checkpoint-all", *baselines_of(graph), BEST, *(("milp",) if at == 2 else ()))
            for method in methods:
                total_s = plan.long_s if method in PROGRAMS else 12 * plan.seconds if method == BEST else None
                rows = partial(_largest, name, graph, image, reading, method, plan.limit_s(method), total_s)
                yield Piece(name, method, str(at), total_s or plan.seconds, 2 if method == BEST else 1, rows)


def _largest(
    name: str,
    graph: Graph,
    image: int,
    reading: tuple[str, int, bool],
    method: str,
    limit_s: float,
    total_s: float | None,
) -> Iterator[Row]:
    words, memory, charged = reading
    subject = graph if charged else graph.with_fixed(graph.fixed_bytes - image)
    for freeing in accountings(method):
        found = max_batch(
            subject,
            memory,
            batch_bytes=image if charged else 0,
            method=method,
            time_limit_s=limit_s,
            total_s=total_s,
            options=options_for(freeing),
        )
        solves = method in (BEST, *PROGRAMS)
        yield {
            "network": name,
            "memory": words,
            "method": method,
            "batch": found.batch,
            "bound": found.bound if solves else "",
            "overhead": "" if found.answer is None else found.answer.overhead,
            "seconds": round(found.seconds, 2),
            "ended": "time" if solves and not found.proved else "",
            "freeing": freeing,
            "limit_s": total_s or "",
        }


def captured(name: str, plan: Settings) -> Iterator[Piece]:
    """A measurement of captured steps, whose profile belongs to all of its rows, in one piece."""

    def rows() -> Iterable[Row]:
        from benchmarks.figures import captured  # imports torch, which takes longer than most pieces

        measure: Callable[[Settings], Iterable[Row]] = getattr(captured, name)
        return measure(plan._replace(seconds=min(plan.seconds, 6.0)))

    yield Piece("", name, "", 3600.0, 2, rows)


def rotor(_: Settings) -> Iterator[Piece]:
    """Rotor's networks in full width at its sizes, profiled on one core, and all plans verified on that profile."""
    from benchmarks.models.stages import PROFILED

    for name in PROFILED:
        yield Piece(name, "rotor", "", 3600.0, 1, partial(_profiled, name))


def _profiled(name: str) -> Iterator[Row]:
    import torch

    from benchmarks.models.stages import build
    from benchmarks.training.rotor import profiled

    torch.set_num_threads(1)
    for row in profiled(name, *build(name, narrow=False)):
        yield {"network": name, **row._asdict()}


MEASURES: dict[str, Callable[[Settings], Iterable[Piece]]] = {
    "batches": batches,
    "tradeoff": tradeoff,
    "ratios": ratios,
    "times": times,
    "rotor": rotor,
    "profiles": partial(captured, "profiles"),
    "trained": partial(captured, "trained"),
}


def wanted(name: str, plan: Settings) -> list[Piece]:
    """The pieces of a measurement that are asked for."""
    if name in ("rotor", "profiles", "trained"):  # one profile for all rows, and networks of their own
        return list(MEASURES[name](plan)) if plan.methods is None is plan.networks else []
    return [piece for piece in MEASURES[name](plan) if plan.wants(piece.network, piece.method)]


def run_piece(name: str, piece: str, folder: Path, plan: Settings) -> None:
    """Run one piece here, and put its rows into the measurement's file with what they were measured on.

    Raises:
        SystemExit: there is no such piece.
    """
    found = next((one for one in wanted(name, plan) if one.name == piece), None)
    if found is None:
        raise SystemExit(f"{name} has no piece {piece}")
    before = machine()
    said = {"piece": piece, "load": before.load, "commit": commit(), "date": before.date}
    _put(folder, name, [{**row, **said} for row in found.rows()], before)


def run_pieces(
    names: Iterable[str], folder: Path, plan: Settings, arguments: list[str], until: float, since: str = ""
) -> bool:
    """Run the pieces that the files do not have yet, the shortest first; whether they have all then.

    What solves something runs in a process of its own, and what keeps one core busy two at a time where there are
    two. After `until`, by the monotonic clock, nothing is started: the next run goes on. What was measured before
    `since`, a date in UTC, is run again.
    """
    left = [
        (piece, name)
        for name in names
        for measured in [measured_pieces(folder, name, since)]
        for piece in wanted(name, plan)
        if piece.name not in measured
    ]
    left.sort(key=lambda item: (item[0].limit_s, item[1]))
    together = min(2, os.cpu_count() or 1)
    hours = sum(piece.limit_s * piece.cores / together for piece, _ in left) / 3600
    print(f"{len(left)} pieces to run, {hours:.1f} hours if each takes its limit; {machine()}", flush=True)
    done = []

    def start(item: tuple[Piece, str]) -> None:
        piece, name = item
        if time.monotonic() + piece.limit_s > until:
            return
        began = time.monotonic()
        if piece.method in FORMULAS:
            run_piece(name, piece.name, folder, plan)
            code = 0
        else:
            command = [sys.executable, "-m", "benchmarks.figures", name, "--piece", piece.name, *arguments]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
        done.append(code == 0)
        said = "" if code == 0 else f", failed with exit code {code}"
        print(f"{name} {piece.name}: {time.monotonic() - began:.1f} s of {piece.limit_s:.0f}{said}", flush=True)

    for cores in (together, 1):
        with ThreadPoolExecutor(together // cores) as pool:
            list(pool.map(start, (item for item in left if min(item[0].cores, together) == cores or together == 1)))
        if together == 1:
            break
    return len(done) == len(left) and all(done)


def measured_pieces(folder: Path, name: str, since: str = "") -> set[str]:
    """The pieces of which a measurement's file has rows, measured on that date or later."""
    return {row["piece"] for row in rows_of(folder, name) if row.get("piece") and row["date"] >= since}


def _put(folder: Path, name: str, new: list[Row], before: Machine) -> None:
    """Put the rows of a piece into a measurement's file, and what all of it was measured on next to it.

    They take the place of the piece's earlier rows, and of rows of the same methods that no piece is named for. Two
    pieces may end at once: one after the other reads the file and replaces it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(whole, fcntl.LOCK_EX)
        mine, owners = {row["piece"] for row in new}, {_owner(row) for row in new}
        old = [
            row
            for row in rows_of(folder, name)
            if row.get("piece") not in mine and (row.get("piece") or _owner(row) not in owners)
        ]
        order = {(piece.network, piece.method): at for at, piece in enumerate(MEASURES[name](Settings()))}
        rows = sorted([*old, *new], key=lambda row: order.get((row["network"], row["method"]), len(order)))
        part = folder / f"{name}.part"
        part.write_text(csv_text(rows, (column for row in new for column in row)))
        part.replace(folder / f"{name}.csv")
        known = [row for row in rows if row.get("piece")]
        dates, commits = sorted({row["date"] for row in known}), sorted({row["commit"] for row in known})
        loads = [float(row["load"]) for row in known]
        older = len(rows) - len(known)
        (folder / f"{name}.txt").write_text(
            f"{dates[0]} to {dates[-1]}, commit {', '.join(commits)}, "
            f"load before a piece {min(loads)} to {max(loads)}; last {machine('highspy').since(before)}"
            + (f"; {older} of {len(rows)} rows are older, without a commit\n" if older else "\n")
        )
    finally:
        os.close(whole)


def _owner(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is a measurement of; a newer one of the same takes its place."""
    return row["network"], row["method"], row.get("memory"), row.get("costs")
