"""Rotor's experiment (RR-9302, Section 5): throughput against peak memory of plain, sequential, revolve and rotor.

Each model is a list of stages with its loss as the last one. Its stages are profiled, every plan is made from that
profile, executed, and measured: CPU seconds of a whole training step, in rounds that interleave all plans, and the peak
of the allocator's own events. `python -m benchmarks.training.rotor --out DIR` writes the rows, the figure and the
tables.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_type_hints

import torch
from torch import nn

from benchmarks.harness.table import table as markdown
from benchmarks.models.stages import MODELS, build
from remat.chains.chained import ChainedModule
from remat.chains.profile import chain_of
from remat.profiling import measure
from remat_ir import Chain, ChainPlan, Problem, budget_at, plain_chain_plan, verify
from remat_solver import solve
from remat_solver.chain import Least, segmented_plan

FRACTIONS = (0.35, 0.5, 0.65, 0.8)
"""Budgets of rotor and revolve next to those of the sequential plans' peaks."""


class Row(NamedTuple):
    """One plan of one model, predicted and measured; times in ms, the spread a share of the median."""

    model: str
    size: str
    method: str
    budget_bytes: int
    predicted_ms: float
    measured_ms: float
    spread: float
    predicted_bytes: int
    measured_bytes: int


def plans_of(chain: Chain) -> Iterator[tuple[str, int, ChainPlan]]:
    """Every method's plans with the budget that each was asked for, each plan once a method."""
    roomy = Problem(chain, 2**53)
    plain = plain_chain_plan(chain)
    yield "plain", verify(roomy, plain).peak_bytes, plain
    peaks = []
    for segments in range(2, max(2, int(2 * chain.stages**0.5)) + 1):
        plan = segmented_plan(chain, segments)
        peaks.append(verify(roomy, plan).peak_bytes)
        yield f"sequential-{segments}", peaks[-1], plan
    budgets = sorted({Least(chain).budget_bytes, *peaks, *(budget_at(chain, f) for f in FRACTIONS)})
    for method, asked in (("rotor", budgets), ("revolve", budgets[:: max(1, len(budgets) // 4)])):
        seen: set[ChainPlan] = set()
        for budget in asked:
            found = solve(Problem(chain, budget), method=method, max_gap=0).plan
            if isinstance(found, ChainPlan) and found not in seen:
                seen.add(found)
                yield method, budget, found


def measured(model: str, size: str, stages: Sequence[nn.Module], x: torch.Tensor, rounds: int) -> list[Row]:
    """Profile a model, make all plans, and run them in turns."""
    chain, needs_grad = chain_of(stages, x, repetitions=max(3, rounds), clock=time.process_time_ns)
    cases = []
    for method, budget, plan in plans_of(chain):
        verdict = verify(Problem(chain, 2**53), plan)
        trained = ChainedModule(stages, chain, plan, needs_grad=needs_grad)
        run = _step(trained, x)
        run()
        peak = measure.peak_memory(run).peak_bytes + chain.fixed_bytes
        cases.append((method, budget, verdict, run, peak))
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds):
        # there and back again, so that a drift of the machine's speed meets all alike
        for i in range(len(cases))[:: 1 if turn % 2 else -1]:
            times[i].append(1e3 * measure.seconds(cases[i][3], clock=time.process_time))
    rows = []
    for (method, budget, verdict, _, peak), found in zip(cases, times, strict=True):
        middle = statistics.median(found)
        spread = (max(found) - min(found)) / middle
        rows.append(Row(model, size, method, budget, verdict.cost_ns / 1e6, middle, spread, verdict.peak_bytes, peak))
    return rows


def _step(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        module(x).backward()

    return run


class Summary(NamedTuple):
    """What the rows of one model and size come to: gains as shares, errors as mean absolute shares."""

    model: str
    size: str
    gain_best: float
    gain_predicted: float
    gain_front: float
    time_error: float
    peak_error: float
    spread: float


def summary(rows: Sequence[Row]) -> Summary:
    """Rotor's gain over the fastest sequential plan within that plan's peak, also as predicted, and over each plan on
    the sequential front.
    """
    sequential = sorted((r for r in rows if r.method.startswith("sequential")), key=lambda r: r.measured_ms)
    rotor = [r for r in rows if r.method == "rotor"]
    front: list[Row] = []
    for row in sequential:
        if not front or row.predicted_bytes < front[-1].predicted_bytes:
            front.append(row)

    def rival(row: Row) -> Row:
        # the plan that rotor gives for that peak, not the one that happened to be measured fastest
        return min((r for r in rotor if r.predicted_bytes <= row.predicted_bytes), key=lambda r: r.predicted_ms)

    def gain(row: Row) -> float:
        return row.measured_ms / rival(row).measured_ms - 1

    return Summary(
        rows[0].model,
        rows[0].size,
        gain(front[0]),
        front[0].predicted_ms / rival(front[0]).predicted_ms - 1,
        statistics.mean(gain(row) for row in front),
        statistics.mean(abs(r.predicted_ms / r.measured_ms - 1) for r in rows),
        statistics.mean(abs(r.predicted_bytes / r.measured_bytes - 1) for r in rows),
        statistics.median(r.spread for r in rows),
    )


def draw(groups: Sequence[Sequence[Row]], path: Path) -> None:
    """The paper's Figure 4: throughput against peak memory, a panel for each model and size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 4
    lines = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4 * columns, 3.1 * lines), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    styles = {"plain": "ks", "sequential": "C1^", "revolve": "C2v", "rotor": "C0o"}
    for axis, rows in zip(axes.flat, groups, strict=False):
        for method, style in styles.items():
            chosen = sorted(
                (r.measured_bytes / 2**20, 1e3 / r.measured_ms) for r in rows if r.method.startswith(method)
            )
            line = "-" if method in ("rotor", "revolve") else ""
            axis.plot([x for x, _ in chosen], [y for _, y in chosen], style + line, ms=4, lw=1, label=method)
        axis.set_title(f"{rows[0].model}, {rows[0].size}", fontsize=9)
        axis.set_xlabel("peak, MiB")
        axis.set_ylabel("steps per CPU second")
        axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def table(summaries: Sequence[Summary]) -> str:
    """The summaries as a table, the means in its last row."""
    names = ("model", "input", "gain", "predicted gain", "gain over the front", "error of time", "of peak", "spread")
    body = [[s.model, s.size, *(f"{share:.1%}" for share in s[2:])] for s in summaries]
    means = [statistics.mean(column) for column in zip(*(s[2:] for s in summaries), strict=True)]
    return markdown(names, [*body, ["mean", "", *(f"{share:.1%}" for share in means)]])


def main() -> None:
    """Measure, write, draw, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("rotor-out"))
    parser.add_argument("--rounds", type=int, default=7, help="runs of each plan, interleaved with the others")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of: {','.join(MODELS)}")
    parser.add_argument("--draw-only", action="store_true", help="read the rows written before, and sum them up again")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rotor.csv"
    if not options.draw_only:
        torch.set_num_threads(1)
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(Row._fields)
            for name in options.models.split(","):
                for size, stages, x in build(name):
                    rows = measured(name, size, stages, x, options.rounds)
                    writer.writerows(rows)
                    file.flush()
                    print(summary(rows), flush=True)
    groups = read(path)
    draw(groups, options.out / "rotor.png")
    text = table([summary(rows) for rows in groups])
    (options.out / "rotor.txt").write_text(text + "\n")
    print(text)


def read(path: Path) -> list[list[Row]]:
    """The rows of a file, by model and size; the latest measurement of each counts."""
    groups: dict[tuple[str, str], list[Row]] = {}
    kinds = get_type_hints(Row)
    with path.open(newline="") as file:
        for found in csv.DictReader(file):
            row = Row(**{name: kinds[name](found[name]) for name in Row._fields})
            group = groups.setdefault((row.model, row.size), [])
            if row.method == "plain":
                group.clear()
            group.append(row)
    return list(groups.values())


if __name__ == "__main__":
    main()
