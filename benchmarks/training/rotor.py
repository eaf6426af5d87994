"""Rotor's experiment (RR-9302, Section 5): throughput against peak memory of plain, sequential, revolve and rotor.

Each model is a list of stages with its loss as the last one. Its stages are profiled, every plan is made from that
profile, executed, and measured: CPU seconds of a whole training step, in rounds that interleave all plans, and the peak
of the allocator's own events. Each round profiles the stages twice, before each half of its runs; the predicted times
are those of the median profile, taken while the machine was in the state of the runs. `python -m
benchmarks.training.rotor --out DIR` writes the rows, the figure and the tables; `--models` chooses. The paper's
networks in their full width are profiled stage by stage on real inputs, and their plans verified, not run: that is
`python -m benchmarks.figures rotor`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.harness.picture import figure, save
from benchmarks.harness.table import table as markdown
from benchmarks.models.stages import TRAINED, build
from remat.chains.modules import ChainedModule
from remat.chains.profile import chain_of
from remat.profiling import measure
from remat_ir import Chain, ChainPlan, Problem, budget_at, plain_chain_plan, verify
from remat_solver import solve
from remat_solver.chain.rotor import segmented_plan
from remat_solver.chain.table import Least

ROWS = Path(__file__).parents[1] / "results" / "rotor.csv"
"""What was measured last."""

FRACTIONS = tuple(n / 10 for n in range(1, 11))
"""Budgets of rotor and revolve next to those of the sequential plans' peaks: ten, equally spaced, as in the paper."""

PROFILES = 5
"""Measurements of each stage that is profiled alone; their median counts."""

MOST_SEGMENTS = 10
"""How many numbers of segments are tried from 2 to 2√L, as in the paper."""


class Row(NamedTuple):
    """One plan of one model, predicted and measured; times in ms, the spread a share of the median.

    What was not measured is None: the plan was verified on the profile only.
    """

    model: str
    size: str
    method: str
    budget_bytes: int
    predicted_ms: float
    measured_ms: float | None
    spread: float | None
    predicted_bytes: int
    measured_bytes: int | None


def plans_of(chain: Chain) -> Iterator[tuple[str, int, ChainPlan]]:
    """Every method's plans with the budget that each was asked for, each plan once a method."""
    unlimited = Problem(chain, 2**53)
    plain = plain_chain_plan(chain)
    yield "plain", verify(unlimited, plain).peak_bytes, plain
    peaks = []
    most = max(2, int(2 * chain.stages**0.5))
    for segments in sorted({2 + (most - 2) * i // (MOST_SEGMENTS - 1) for i in range(MOST_SEGMENTS)}):
        plan = segmented_plan(chain, segments)
        peaks.append(verify(unlimited, plan).peak_bytes)
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
    """Profile a model, make all plans, and run them in turns with the profile."""
    chain, needs_grad = chain_of(stages, x, repetitions=max(3, rounds), clock=time.process_time_ns)
    cases = []
    for method, budget, plan in plans_of(chain):
        verdict = verify(Problem(chain, 2**53), plan)
        trained = ChainedModule(stages, chain, plan, needs_grad=needs_grad)
        run = measure.forward_backward(trained, (x,))
        run()
        peak = measure.peak_memory(run).peak_bytes + chain.fixed_bytes
        cases.append((method, budget, plan, verdict, run, peak))
    times: list[list[float]] = [[] for _ in cases]
    profiles: list[Chain] = []
    for turn in range(rounds):
        # there and back again, so that a drift of the machine's speed meets all alike, the profile too
        order = range(len(cases))[:: 1 if turn % 2 else -1]
        for half in (order[: len(order) // 2], order[len(order) // 2 :]):
            profiles.append(chain_of(stages, x, repetitions=2, clock=time.process_time_ns).chain)
            for i in half:
                times[i].append(1e3 * measure.seconds(cases[i][4], clock=time.process_time))
    timed = Problem(median_times(chain, profiles), 2**53)
    rows = []
    for (method, budget, plan, verdict, _, peak), found in zip(cases, times, strict=True):
        middle = statistics.median(found)
        spread = (max(found) - min(found)) / middle
        predicted = verify(timed, plan).cost_ns / 1e6
        rows.append(Row(model, size, method, budget, predicted, middle, spread, verdict.peak_bytes, peak))
    return rows


def median_times(chain: Chain, profiles: Sequence[Chain]) -> Chain:
    """A chain with the median times of several profiles of it, step by step."""
    forward = [round(statistics.median(times)) for times in zip(*(p.forward_ns for p in profiles), strict=True)]
    backward = [round(statistics.median(times)) for times in zip(*(p.backward_ns for p in profiles), strict=True)]
    return replace(chain, forward_ns=tuple(forward), backward_ns=tuple(backward))


def profiled(model: str, size: str, stages: Sequence[nn.Module], x: torch.Tensor) -> list[Row]:
    """Profile a model, and verify all plans on that profile."""
    chain = chain_of(stages, x, repetitions=PROFILES, clock=time.process_time_ns).chain
    rows = []
    for method, budget, plan in plans_of(chain):
        verdict = verify(Problem(chain, 2**53), plan)
        rows.append(Row(model, size, method, budget, verdict.cost_ns / 1e6, None, None, verdict.peak_bytes, None))
    return rows


class Summary(NamedTuple):
    """What the rows of one model and size come to: gains as shares, errors as mean absolute shares; None unmeasured."""

    model: str
    size: str
    stages_run: str
    gain_best: float | None
    gain_predicted: float
    gain_front: float
    time_error: float | None
    peak_error: float | None
    spread: float | None


def summary(rows: Sequence[Row]) -> Summary:
    """Rotor's gain over the fastest sequential plan within that plan's peak, also as predicted, and over each plan on
    the sequential front.
    """
    ran = all(row.measured_ms is not None for row in rows)

    def time_of(row: Row) -> float:
        return row.predicted_ms if row.measured_ms is None else row.measured_ms

    sequential = sorted((r for r in rows if r.method.startswith("sequential")), key=time_of)
    rotor = [r for r in rows if r.method == "rotor"]
    front: list[Row] = []
    for row in sequential:
        if not front or row.predicted_bytes < front[-1].predicted_bytes:
            front.append(row)

    def rival(row: Row) -> Row:
        # the plan that rotor gives for that peak, not the one that happened to be measured fastest
        return min((r for r in rotor if r.predicted_bytes <= row.predicted_bytes), key=lambda r: r.predicted_ms)

    def gain(row: Row) -> float:
        return time_of(row) / time_of(rival(row)) - 1

    errors = [r.predicted_ms / r.measured_ms - 1 for r in rows if r.measured_ms is not None]
    peaks = [r.predicted_bytes / r.measured_bytes - 1 for r in rows if r.measured_bytes is not None]
    return Summary(
        rows[0].model,
        rows[0].size,
        "trained" if ran else "profiled",
        gain(front[0]) if ran else None,
        front[0].predicted_ms / rival(front[0]).predicted_ms - 1,
        statistics.mean(gain(row) for row in front),
        statistics.mean(map(abs, errors)) if ran else None,
        statistics.mean(map(abs, peaks)) if ran else None,
        statistics.median(r.spread for r in rows if r.spread is not None) if ran else None,
    )


def draw(groups: Sequence[Sequence[Row]], path: Path) -> None:
    """The paper's Figure 4: throughput against peak memory, a panel for each model and size."""
    drawn, axes = figure(len(groups), -(-len(groups) // 4), (4, 3.1))
    styles = {"plain": "ks", "sequential": "C1^", "revolve": "C2v", "rotor": "C0o"}
    for axis, rows in zip(axes.flat, groups, strict=False):
        for method, style in styles.items():
            chosen = sorted(
                ((r.measured_bytes or r.predicted_bytes) / 2**20, 1e3 / (r.measured_ms or r.predicted_ms))
                for r in rows
                if r.method.startswith(method)
            )
            line = "-" if method in ("rotor", "revolve") else ""
            axis.plot([x for x, _ in chosen], [y for _, y in chosen], style + line, ms=4, lw=1, label=method)
        how = "" if rows[0].measured_ms is not None else ", profiled"
        axis.set_title(f"{rows[0].model}, {rows[0].size}{how}", fontsize=9)
        axis.set_xlabel("peak, MiB")
        axis.set_ylabel("steps per CPU second")
        axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    save(drawn, path)


def table(summaries: Sequence[Summary]) -> str:
    """The summaries as a table: what was trained, its means, and what was profiled, with the means of that."""
    names = ("model", "input", "how", "gain", "predicted gain", "gain over the front", "error of time", "of peak")
    body = []
    for how in ("trained", "profiled"):
        chosen = [s for s in summaries if s.stages_run == how]
        body += [[s.model, s.size, how, *map(_share, s[3:])] for s in chosen]
        columns = zip(*(s[3:] for s in chosen), strict=True)
        means = [None if None in column else statistics.mean(column) for column in columns]
        body += [["mean", "", how, *map(_share, means)]] if chosen else []
    return markdown((*names, "spread"), body)


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def main() -> None:
    """Measure, write, draw, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("rotor-out"))
    parser.add_argument("--rounds", type=int, default=7, help="runs of each plan, interleaved with the others")
    parser.add_argument("--models", default=",".join(TRAINED), help=f"to train, some of: {','.join(TRAINED)}")
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
            for name in filter(None, options.models.split(",")):
                rows = measured(name, *build(name), options.rounds)
                writer.writerows(rows)
                file.flush()
                print(name, summary(rows), flush=True)
    groups = read(path)
    draw(groups, options.out / "rotor.png")
    text = table([summary(rows) for rows in groups])
    (options.out / "rotor.txt").write_text(text + "\n")
    print(text)


def read(path: Path) -> list[list[Row]]:
    """The rows of a file, by model and size; the latest measurement of each counts."""
    with path.open(newline="") as file:
        return groups_of(csv.DictReader(file))


def groups_of(found: Iterable[Mapping[str, str]]) -> list[list[Row]]:
    """Rows as text, by model and size."""
    groups: dict[tuple[str, str], list[Row]] = {}
    kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(Row._fields, float)
    kinds |= dict.fromkeys(("model", "size", "method"), str)
    kinds |= dict.fromkeys(("budget_bytes", "predicted_bytes", "measured_bytes"), int)
    for text in found:
        row = Row(*(kinds[name](text[name]) if text[name] else None for name in Row._fields))
        group = groups.setdefault((row.model, row.size), [])
        if row.method == "plain":
            group.clear()
        group.append(row)
    return list(groups.values())


if __name__ == "__main__":
    main()
