"""Pictures and a page from the measured CSV files, next to what the paper reports."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness.picture import figure, save
from benchmarks.harness.table import table

Rows: TypeAlias = list[dict[str, str]]

NAMES = {
    "vgg16": "VGG16",
    "vgg19": "VGG19",
    "mobilenet": "MobileNet",
    "unet": "U-Net",
    "fcn8": "FCN8",
    "segnet": "SegNet",
    "resnet50": "ResNet50",
}
HIGHEST = 2.0
"""Where the trade-off picture ends: above it are plans that nobody would run."""
STYLES = {
    "auto": ("black", "o"),
    "milp": ("tab:red", "s"),
    "milp-tight": ("tab:blue", "^"),
    "checkpoint-all": ("tab:gray", "*"),
    "griewank": ("tab:purple", "v"),
    "chen-sqrt": ("tab:orange", "D"),
    "chen-greedy": ("tab:blue", "s"),
    "ap-sqrt": ("tab:orange", "D"),
    "ap-greedy": ("tab:blue", "s"),
    "linearized-sqrt": ("tab:brown", "P"),
    "linearized-greedy": ("tab:green", "^"),
    "lp-rounding": ("tab:red", "x"),
    "rotor": ("tab:cyan", "h"),
}
PAPER_LARGEST = {"unet": 61, "vgg19": 289, "mobilenet": 1105, "fcn8": 60, "segnet": 62, "resnet50": 193}
_PUBLISHED = {name: str(batch) for name, batch in PAPER_LARGEST.items()} | {"unet": "57 (printed version: 61)"}
PAPER_RATIOS = {
    "mobilenet": ("1.14", "1.07", "7.07", "1.06"),
    "vgg16": ("1.28", "1.06", "1.44", "1.01"),
    "vgg19": ("1.54", "1.39", "1.75", "1.00"),
    "unet": ("1.27", "1.23", "–", "1.03"),
    "resnet50": ("1.20", "1.25", "–", "1.05"),
}
APPROXIMATIONS = ("ap-sqrt", "ap-greedy", "griewank", "lp-rounding")

_HEAD = """# The papers' figures

This page repeats the figures and tables of the Checkmate paper with remat's own solvers, so that you can compare
methods at a glance. [The papers, line by line](../../docs/papers.md) lists everything else in the papers.

Each figure is measured by one command. Unless the text says otherwise, the training graphs are the project's own for
the networks of the paper (`benchmarks/graphs/architectures.py`: one op per layer, its backward op twice as expensive,
32-bit floats). The verifier has replayed every plan behind a number. "Proved" means that no plan of the whole space
is better, not only that none was found. `*` marks what ended on its time limit. Where a cell of a baseline has two
numbers, the first counts memory as the papers do, by equations 2 to 5 (what S retains is held as long as S says), the
second frees each value after its last use; the pictures show the first.

"""

_TRADEOFF = """## Overhead against budget (Checkmate, Figure 4)

![Overhead against budget](figures/tradeoff.png)

How to read the tables: overhead in % at each budget; `–` means that the method has no plan. `auto` is followed by its
proved lower bound where the two differ by more than 0.1 % of cost. Costs come from a roofline of the V100 (15.7
TFLOP/s, 900 GB/s, 5 µs a launch) in place of the paper's profile; batch sizes are those of the paper's public graphs.
On linear networks the AP and linearized methods are the same as Chen's.

The paper's main results are the lowest overhead everywhere, and for U-Net at 16 GB plans 1.20 times faster than
linearized greedy's and 1.38 times faster than linearized √n's.

"""

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

_BATCHES = """## The largest batch at one more forward pass (Checkmate, Figure 6)

![The largest batch](figures/batches.png)

Setting: costs in FLOPs; images of 416 × 608 for the segmentation networks and 224 × 224 for the others. Memory is 2 ×
parameters, the activations and, where the heading says so, the input batch (equations 2, 9 and 10). The paper does
not say whether a V100's 16 GB are 16 · 10⁹ or 2³⁴ bytes, nor whether Figure 6 charges the input, so there are three
tables. `auto` is followed by the largest batch that is not proved impossible, where that is another number. On linear
networks (VGG19, MobileNet, SegNet) the AP and linearized methods are the same as Chen's; Griewank's needs a linear
network.

The paper's 193 for ResNet50 is not an optimum: its program is quadratic and was stopped after a day, and the paper
calls Figure 6 a lower bound there. That is not the whole of the difference: Chen's heuristics, which are closed
formulas, have more than that on this graph (353 ops; batch norms and ReLUs are separate ops).

The paper's headline is the ratio of its largest batch to the baselines': 5.1 times checkpoint-all's, 2.6 times the
best heuristic's for U-Net and 2.19 for MobileNet. Below each table are ours.

"""

_RATIOS = """## Cost against the optimum (Checkmate, Table 2 of the printed version)

Each entry is the geometric mean of cost / best known cost, in FLOPs, over the budgets at which the method has a plan,
followed by their number out of the budgets at which any plan is known. The paper's value is in brackets. The last
column is the geometric mean of best known cost / proved bound: by so much the ratios could still be too small.

"""

_TIMES = """## Solve time against graph size

![Solve time](figures/times.png)

The budget is halfway between the largest need of a single op and the plain peak; of the paper's program for ResNet50,
a quarter, half and three quarters of the way. A solve ends at a gap of 0.1 % of
cost. `milp` is the paper's program and `milp-tight` the disaggregated one, both on HiGHS; their bounds cover plans
with one recomputation per op and stage. Compiling the local search, once
per installation, is not counted.

"""


def rows_of(folder: Path, name: str) -> Rows:
    """The rows of one CSV file, network by network; none if it is not there."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        order = {name: at for at, name in enumerate(NAMES)}
        return sorted(csv.DictReader(file), key=lambda row: order.get(row["network"], len(order)))


def overhead(row: dict[str, str]) -> float | None:
    """What a plan costs more than each op once, as a share; None without a plan."""
    return int(row["cost"]) / int(row["once"]) - 1 if row["cost"] else None


def by(rows: Rows, key: str) -> dict[str, Rows]:
    """The rows grouped by a column."""
    groups: dict[str, Rows] = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return dict(groups)


def curves(axis: Any, rows: Rows, at: Callable[[dict[str, str]], float], label: str) -> None:
    """Cost over the cost of each op once, a curve for each method, by what `at` makes of a row."""
    for method, points in by(rows, "method").items():
        known = [(at(row), overhead(row)) for row in points]
        drawn = [(budget, 1 + over) for budget, over in known if over is not None]
        colour, marker = STYLES[method]
        if drawn:
            axis.plot(*zip(*drawn, strict=True), marker=marker, color=colour, label=method, ms=5)
    axis.set(xlabel=label, ylabel="cost / cost of each op once")
    axis.set_ylim(top=min(axis.get_ylim()[1], HIGHEST))
    axis.legend(fontsize=7)


def accounted(rows: Rows, freeing: str) -> Rows:
    """The rows that count memory one way, "paper" or "" for ours; of methods that know one way, those."""
    two = {row["method"] for row in rows if row.get("freeing")}
    return [row for row in rows if row["method"] not in two or row["freeing"] == freeing]


def both(rows: Rows, method: str, say: Callable[[dict[str, str] | None], str]) -> str:
    """A method's cell as the paper counts memory, and as we do where that is another."""
    texts = [
        say(next((row for row in accounted(rows, freeing) if row["method"] == method), None))
        for freeing in ("paper", "")
    ]
    return texts[0] if texts[0] == texts[1] else " / ".join(texts)


def stopped(row: dict[str, str]) -> str:
    """The mark of a cell that ended on its time limit."""
    return "*" if row.get("ended") == "time" else ""


def auto_first(rows: Rows) -> list[str]:
    """The methods of some rows, auto before the others."""
    return sorted(by(rows, "method"), key=lambda method: method != "auto")


def cell(row: dict[str, str] | None, method: str) -> str:
    """An overhead in %, for auto with its proved bound where that is another number."""
    if row is None or not row["cost"]:
        if row is not None and stopped(row):
            return f"–{stopped(row)}"
        return "infeasible" if row is not None and row["status"] == "infeasible" and method == "auto" else "–"
    over, cost, bound = overhead(row), int(row["cost"]), int(row["bound"] or row["once"])
    assert over is not None
    if method != "auto" or (cost - bound) / cost <= 0.001:
        return f"{100 * over:.2f}{stopped(row)}"
    return f"{100 * over:.2f}{stopped(row)} (≥ {100 * (bound / int(row['once']) - 1):.2f})"


def draw(folder: Path) -> None:
    """Write a picture for each CSV file that is there, and the page `figures.md` next to the folder."""
    for name, (picture, _) in _FIGURES.items():
        if picture is not None and (rows := rows_of(folder, name)):
            picture(rows, folder / f"{name}.png")
    (folder.parent / "figures.md").write_text(page(folder))


def page(folder: Path) -> str:
    """The page's text from the CSV files that are there."""
    parts = [_HEAD.strip()]
    for name, (_, section) in _FIGURES.items():
        if rows := rows_of(folder, name):
            how = (folder / f"{name}.txt").read_text().strip()
            parts.append(section(rows).strip())
            data = f"[{name}.csv]({folder.name}/{name}.csv)"
            parts.append(f"Measured by `python -m benchmarks.figures {name}`: {how}. Data: {data}.")
    return "\n\n".join(parts) + "\n"


def _draw_tradeoff(rows: Rows, path: Path) -> None:
    networks = by(rows, "network")
    drawn, axes = figure(len(networks))
    for axis, (name, mine) in zip(axes[0], networks.items(), strict=True):
        curves(axis, accounted(mine, "paper"), lambda row: int(row["budget_bytes"]) / 1e9, "budget (GB)")
        axis.set_title(f"{NAMES[name]}, batch {mine[0]['batch']}")
    save(drawn, path)


def _say_tradeoff(rows: Rows) -> str:
    text = _TRADEOFF
    for name, mine in by(rows, "network").items():
        methods = auto_first(mine)
        body = []
        for budget, points in sorted(by(mine, "budget_bytes").items(), key=lambda item: int(item[0])):
            cells = (both(points, method, partial(cell, method=method)) for method in methods)
            body.append([f"{int(budget) / 1e9:.2f}", *cells])
        text += f"### {NAMES[name]}, batch {mine[0]['batch']}\n\n" + table(["GB", *methods], body) + "\n\n"
    return text


def _draw_profiles(rows: Rows, path: Path) -> None:
    """A row of panels for measured costs, and one for the roofline."""
    networks, kinds = by(rows, "network"), by(rows, "costs")
    drawn, axes = figure(len(networks) * len(kinds), rows=len(kinds))
    for line, costs in zip(axes, kinds, strict=True):
        for axis, (name, mine) in zip(line, networks.items(), strict=True):
            here = [row for row in mine if row["costs"] == costs]
            curves(axis, here, lambda row: 100 * float(row["share"]), "budget, from the least to plain (%)")
            axis.set_title(f"{NAMES[name]}, batch {here[0]['batch']}, {costs}")
    save(drawn, path)


def _say_profiles(rows: Rows) -> str:
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


def _say_trained(rows: Rows) -> str:
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


def _draw_batches(rows: Rows, path: Path) -> None:
    first = rows[0]["memory"]
    mine = accounted([row for row in rows if row["memory"] == first], "paper")
    networks = by(mine, "network")
    drawn, axes = figure(len(networks), rows=2 if len(networks) > 3 else 1)
    for axis, (name, points) in zip(axes.flat, networks.items(), strict=False):
        colours = [STYLES[row["method"]][0] for row in points]
        bars = axis.bar([row["method"] for row in points], [int(row["batch"]) for row in points], color=colours)
        axis.bar_label(bars)
        axis.margins(y=0.15)
        axis.axhline(float(_PUBLISHED[name].split()[0]), color="red", ls=":", label="Checkmate, published")
        axis.set(title=NAMES[name], ylabel="largest batch")
        axis.tick_params(axis="x", labelrotation=60)
        axis.legend(fontsize=7)
    save(drawn, path)


def _say_batches(rows: Rows) -> str:
    text = _BATCHES
    for reading, mine in by(rows, "memory").items():
        body = []
        for name, points in by(mine, "network").items():
            there = by(points, "method")
            names = [method if method in there else _ON_LINEAR.get(method, method) for method in _BATCH_METHODS]
            body.append([NAMES[name], _PUBLISHED[name], *(both(points, method, _batch) for method in names)])
        text += f"### {reading}\n\n" + table(["network", "published", *_BATCH_METHODS], body) + "\n\n"
        text += _headline(mine) + "\n\n"
    return text


def headline(rows: Rows, network: str, freeing: str, over: Sequence[str] = ()) -> float | None:
    """The largest batch of `auto` over that of the best of some methods, of all baselines if none is named."""
    mine = by(accounted([row for row in rows if row["network"] == network], freeing), "method")
    others = [int(mine[method][0]["batch"]) for method in over or mine if method in mine and method not in _SOLVERS]
    return int(mine["auto"][0]["batch"]) / max(others) if "auto" in mine and max(others, default=0) else None


def _headline(rows: Rows) -> str:
    body = []
    for name in by(rows, "network"):
        said = [headline(rows, name, freeing, over) for over in (("checkpoint-all",), ()) for freeing in ("paper", "")]
        body.append([NAMES[name], *("–" if ratio is None else f"{ratio:.2f}" for ratio in said[1:])])
    return table(
        ["auto over", "checkpoint-all", "the best baseline, memory as the paper counts", "freed after the last use"],
        body,
    )


_SOLVERS = ("auto", "milp")
_ON_LINEAR = {
    "ap-sqrt": "chen-sqrt",
    "ap-greedy": "chen-greedy",
    "linearized-sqrt": "chen-sqrt",
    "linearized-greedy": "chen-greedy",
}
_BATCH_METHODS = ("checkpoint-all", "griewank", *_ON_LINEAR, "milp", "auto")


def _batch(row: dict[str, str] | None) -> str:
    if row is None:
        return "–"
    if not row["bound"]:
        return row["batch"]
    proved = "proved" if row["batch"] == row["bound"] else f"(≤ {row['bound']})"
    return f"**{row['batch']}**{stopped(row)} {proved}"


def _say_ratios(rows: Rows) -> str:
    text = _RATIOS
    body = []
    for name, mine in by(rows, "network").items():
        best = {row["budget_bytes"]: row for row in mine if row["method"] == "auto" and row["cost"]}
        line = [NAMES[name]]
        for method, paper in zip(APPROXIMATIONS, PAPER_RATIOS[name], strict=True):
            means = [
                f"{ratio:.3f}{mark}, {count} of {len(best)}" if count else "–"
                for ratio, count, mark in (over_best(mine, method, freeing) for freeing in ("paper", ""))
            ]
            line.append(f"{' / '.join(dict.fromkeys(means))} ({paper})")
        gaps = [int(row["cost"]) / int(row["bound"] or row["once"]) for row in best.values()]
        body.append([*line, f"{_geometric(gaps):.4f}" if gaps else "–"])
    return text + table(["network", *APPROXIMATIONS, "best / bound"], body)


def over_best(rows: Rows, method: str, freeing: str) -> tuple[float, int, str]:
    """The geometric mean of a method's cost over the best known one, of how many budgets, and the mark of a limit."""
    best = {row["budget_bytes"]: row for row in rows if row["method"] == "auto" and row["cost"]}
    mine = [row for row in accounted(rows, freeing) if row["method"] == method and row["budget_bytes"] in best]
    over = [int(row["cost"]) / int(best[row["budget_bytes"]]["cost"]) for row in mine if row["cost"]]
    return _geometric(over) if over else math.nan, len(over), "*" if any(map(stopped, mine)) else ""


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _draw_times(rows: Rows, path: Path) -> None:
    drawn, axes = figure(1)
    for method, points in by(rows, "method").items():
        points = sorted(points, key=lambda row: int(row["ops"]))
        colour, marker = STYLES[method]
        sizes, seconds = [int(row["ops"]) for row in points], [float(row["seconds"]) for row in points]
        axes[0][0].plot(sizes, seconds, marker=marker, color=colour, label=method)
        for row in points:
            if row["status"] != "optimal" and not _settled(row):
                axes[0][0].annotate(_ending(row), (int(row["ops"]), float(row["seconds"])), fontsize=7, color=colour)
    axes[0][0].set(xlabel="ops", ylabel="seconds", yscale="log", xscale="log")
    from matplotlib.ticker import ScalarFormatter

    for line in (axes[0][0].xaxis, axes[0][0].yaxis):
        line.set_major_formatter(ScalarFormatter())
        line.set_minor_formatter(ScalarFormatter())
    axes[0][0].tick_params(which="both", labelsize=7)
    axes[0][0].legend()
    save(drawn, path)


def _settled(row: dict[str, str]) -> bool:
    return bool(row["cost"]) and bool(row["bound"]) and int(row["cost"]) - int(row["bound"]) <= 0.001 * int(row["cost"])


def _ending(row: dict[str, str]) -> str:
    if not row["cost"]:
        return "no plan"
    gap = 100 * (1 - int(row["bound"] or row["once"]) / int(row["cost"]))
    return "optimal" if gap == 0 else f"gap {gap:.1g} %" if gap >= 0.001 else "gap < 0.001 %"


def _say_times(rows: Rows) -> str:
    text = _TIMES
    body = []
    for name, points in by(sorted(rows, key=lambda row: int(row["ops"])), "network").items():
        cells = by(points, "method")
        said = (", ".join(map(_time, cells.get(method, ()))) for method in ("milp", "milp-tight", "auto"))
        body.append([NAMES[name], points[0]["ops"], *said])
    return text + table(["network", "ops", "milp", "milp-tight", "auto"], body)


def _time(row: dict[str, str]) -> str:
    return f"{float(row['seconds']):.1f} s{stopped(row)}, {_ending(row)}"


_FIGURES: dict[str, tuple[Callable[[Rows, Path], None] | None, Callable[[Rows], str]]] = {
    "tradeoff": (_draw_tradeoff, _say_tradeoff),
    "profiles": (_draw_profiles, _say_profiles),
    "trained": (None, _say_trained),
    "batches": (_draw_batches, _say_batches),
    "ratios": (None, _say_ratios),
    "times": (_draw_times, _say_times),
}
"""What draws each measurement, and what says it."""
