"""What the figures share: names, styles, rows of a file, panels of curves and tables of overheads."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

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


def figure(count: int, rows: int = 1) -> tuple[Any, Any]:
    """A figure of so many panels, and the array of their axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    columns = -(-count // rows)
    return pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), layout="constrained", squeeze=False)


def save(figure: Any, path: Path) -> None:
    """Write a figure without what would change from one version of the library to the next."""
    figure.savefig(path, dpi=110, metadata={"Software": None})


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
