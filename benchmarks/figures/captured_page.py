"""The picture and the tables of captured steps: costs measured and by a roofline, and plans trained."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.figures.panels import NAMES, Rows, auto_first, by, cell, curves, figure, overhead, save
from benchmarks.harness.table import table

_PROFILES = """## The same by measured costs (Checkmate, Figure 4, captured)

![Overhead by measured costs and by a roofline](figures/profiles.png)

The paper's costs are a profile. Here the three networks are modules (`benchmarks/models/paper.py`: a quarter of the
channels, images of 96 × 96) whose training steps are captured. *Measured*: as the step runs on this machine's CPU,
its kernels measured one by one. *Roofline*: as it would run on a V100 (15.7 TFLOP/s, 900 GB/s, 5 µs a launch, and the
shares of these that kernels are taken to achieve) at the paper's batch. Budgets go from the least at which a plan is
known (0 %) to plain training's peak (100 %); gradients of parameters are part of both. Each cell is overhead in % by
measured costs / by the roofline; `–` is no plan; auto is followed by its proved lower bound where the two differ by
more than 0.1 % of cost. Where a captured network is a chain of stages, `rotor` is its best persistent schedule.

"""

_TRAINED = """## The plans of the figure, trained

Each method's plans for U-Net's measured step above, carried out on one core and trained; the step is profiled again by
this command. A cell is the overhead in %: predicted → measured. Measured is the median over nine rounds of the CPU
seconds of a step by the plan over those of a plain step right before or after it.

"""


def draw_profiles(rows: Rows, path: Path) -> None:
    """A row of panels for measured costs, and one for the roofline."""
    networks, kinds = by(rows, "network"), by(rows, "costs")
    drawn, axes = figure(len(networks) * len(kinds), rows=len(kinds))
    for line, costs in zip(axes, kinds, strict=True):
        for axis, (name, mine) in zip(line, networks.items(), strict=True):
            here = [row for row in mine if row["costs"] == costs]
            curves(axis, here, lambda row: 100 * float(row["share"]), "budget, from the least to plain (%)")
            axis.set_title(f"{NAMES[name]}, batch {here[0]['batch']}, {costs}")
    save(drawn, path)


def say_profiles(rows: Rows) -> str:
    """A table for each network."""
    text = _PROFILES
    for name, mine in by(rows, "network").items():
        methods, kinds = auto_first(mine), by(mine, "costs")
        body = []
        for share, points in sorted(by(mine, "share").items(), key=lambda item: float(item[0])):
            cells = {(row["costs"], row["method"]): row for row in points}
            pairs = ([cell(cells.get((costs, method)), method) for costs in kinds] for method in methods)
            body.append([f"{100 * float(share):.0f} %", *(" / ".join(pair) for pair in pairs)])
        sizes = " / ".join(map(_sizes, kinds.values()))
        text += f"### {NAMES[name]}: {sizes}\n\n" + table(["budget", *methods], body) + "\n\n"
    return text


def _sizes(rows: Rows) -> str:
    budgets = [int(row["budget_bytes"]) / 2**20 for row in rows]
    return f"batch {rows[0]['batch']}, {rows[0]['ops']} ops, {min(budgets):.0f} to {max(budgets):.0f} MiB"


def say_trained(rows: Rows) -> str:
    """A table, and what holds of all plans in it."""
    methods, body = auto_first(rows), []
    for share, points in sorted(by(rows, "share").items(), key=lambda item: float(item[0])):
        cells = {row["method"]: row for row in points}
        body.append([f"{100 * float(share):.0f} %", *(_pair(cells.get(method)) for method in methods)])
    plans = {(row["cost"], row["peak_bytes"], row["measured"]): row for row in rows}.values()
    over = [float(row["measured"]) - (overhead(row) or 0.0) for row in plans]
    errors = [abs((1 + (overhead(row) or 0.0)) / (1 + float(row["measured"])) - 1) for row in plans]
    equal = sum(row["unequal"] == "0" for row in plans)
    below = sum(int(row["measured_bytes"]) <= int(row["predicted_bytes"]) for row in plans)
    short = [1 - int(row["measured_bytes"]) / int(row["predicted_bytes"]) for row in plans]
    return f"""{_TRAINED}{table(["budget", *methods], body)}

{len(plans)} plans. Loss, all gradients, buffers and the generators' states are bit for bit those of stock `aot_eager`
([what equals what](../../docs/exactness.md)): {equal} of {len(plans)}. The peak by the allocator's own events is at
most the predicted one: {below} of {len(plans)}, {100 * max(map(abs, short)):.2f} % off at most. The ratio to
plain is predicted with a mean error of {100 * statistics.mean(errors):.1f} % ({100 * max(errors):.1f} % at most);
measured overhead is {100 * statistics.mean(over):+.1f} points from the predicted one on average.
"""


def _pair(row: dict[str, str] | None) -> str:
    if row is None:
        return "–"
    return f"{100 * (overhead(row) or 0.0):.1f} → {100 * float(row['measured']):.1f}"
