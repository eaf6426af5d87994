"""Memory over the steps and cost over the budget, as text for a terminal or as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from remat_ir import Answer, InvalidData, readable

from .files import check_writable

BLOCKS = " ▁▂▃▄▅▆▇█"


def memory_chart(curve: Sequence[int], budget: int | None, *, width: int = 80, height: int = 12) -> str:
    """Memory over the steps as blocks of text, the budget as a line of dashes."""
    columns = _fitted(curve, max(20, width - 12))
    top = max(*columns, budget or 0, 1)
    line = None if budget is None else int((budget / top) * height - 1e-9)
    rows = []
    for row in reversed(range(height)):
        cells = ""
        for level in columns:
            eighths = round(level / top * height * 8) - row * 8
            cell = BLOCKS[max(0, min(8, eighths))]
            cells += "╌" if row == line and cell == " " else cell
        label = readable(round(top * (row + 1) / height)) if row % 4 == 3 or row == height - 1 else ""
        rows.append(f"{label:>10} {cells}")
    rows.append(f"{'':>10} {'first op':<{len(columns) // 2}}{'last op':>{len(columns) - len(columns) // 2}}")
    return "\n".join(rows)


def curve_chart(answers: Sequence[Answer], plain_bytes: int, *, width: int = 80) -> str:
    """Overhead over budget as bars of text, one line a budget; a bar beyond +100 % ends in an arrow."""
    known = [min(1.0, answer.overhead) for answer in answers if answer.overhead is not None]
    most = max(known, default=0.0) or 1.0
    lines = []
    for answer in sorted(answers, key=lambda answer: answer.budget_bytes):
        share = f"{answer.budget_bytes / max(1, plain_bytes):6.3f}"
        if answer.overhead is None:
            lines.append(f"{share} {'✗ ' + answer.status.value}")
            continue
        bar = "█" * round(min(1.0, answer.overhead) / most * (width - 24)) + ("▶" if answer.overhead > 1 else "")
        lines.append(f"{share} {bar or '▏'} {100 * answer.overhead:.3g} %")
    return "\n".join(lines)


def memory_picture(
    path: Path,
    curves: Sequence[tuple[str, Sequence[int]]],
    budget: int | None,
    *,
    title: str = "",
    measured: Sequence[tuple[str, Sequence[int]]] = (),
) -> None:
    """Memory over the steps as a picture: one line for each (name, bytes while each op runs), the budget dashed.

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    for name, curve in curves:
        axes.step(range(len(curve)), [size / 2**20 for size in curve], where="mid", label=name, linewidth=1.2)
    for name, curve in measured:
        axes.plot(range(len(curve)), [size / 2**20 for size in curve], ":", label=name, linewidth=1.2)
    if budget is not None:
        axes.axhline(budget / 2**20, color="crimson", linestyle="--", linewidth=1, label="budget")
    axes.set(xlabel="step of the plan", ylabel="memory in MiB", title=title)
    axes.set_ylim(bottom=0)
    _save(figure, axes, path)


def curve_picture(
    path: Path,
    answers: Sequence[Answer],
    plain_bytes: int,
    *,
    title: str = "",
    others: Sequence[tuple[str, Sequence[Answer]]] = (),
) -> None:
    """Overhead over budget as a picture: plans, proved bounds, the zone where no plan fits, other curves by name.

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    solved = sorted((a for a in answers if a.overhead is not None), key=lambda answer: answer.budget_bytes)
    at = [answer.budget_bytes / 2**20 for answer in solved]
    axes.plot(at, [100 * (answer.overhead or 0) for answer in solved], "o-", label="plan")
    bounds = [
        100 * ((answer.bound_ns or 0) / (answer.cost_ns or 1) * (1 + (answer.overhead or 0)) - 1) for answer in solved
    ]
    axes.plot(at, bounds, "_", color="gray", label="proved bound", markersize=10)
    for name, curve in others:
        known = sorted((a.budget_bytes / 2**20, 100 * a.overhead) for a in curve if a.overhead is not None)
        axes.plot([size for size, _ in known], [overhead for _, overhead in known], "s--", label=name)
    bad = max((a for a in answers if a.status.value == "infeasible"), key=lambda a: a.budget_bytes, default=None)
    if bad is not None:
        sure = "certified" if bad.claimed_by is None else f"claimed by {bad.claimed_by}"
        axes.axvspan(0, bad.budget_bytes / 2**20, color="crimson", alpha=0.12, label=f"no plan fits, {sure}")
    axes.axvline(plain_bytes / 2**20, color="gray", linestyle=":", linewidth=1, label="plain peak")
    axes.set(xlabel="budget in MiB", ylabel="overhead in %", title=title)
    axes.set_xlim(left=0)
    if axes.get_ylim()[1] > 105:  # one plan for next to no memory would squash all that one might choose
        axes.set_ylim(top=105)
    _save(figure, axes, path)


def ways_picture(path: Path, ways: Sequence[tuple[str, int, float]], budget: int, *, title: str = "") -> None:
    """Ways to train one step as a picture: a point for each (name, peak in bytes, overhead as a share).

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    colors = _colors(len(ways))
    for at, (name, peak, overhead) in enumerate(ways):
        marker = MARKERS[at % len(MARKERS)]
        axes.plot([peak / 2**20], [100 * overhead], marker, color=colors[at], label=name, markersize=7)
    axes.axvline(budget / 2**20, color="crimson", linestyle="--", linewidth=1, label="budget")
    axes.set(xlabel="peak in MiB", ylabel="overhead in %", title=title)
    axes.set_xlim(left=0)
    _save(figure, axes, path)


MARKERS = "osD^vP*X<>hp8d"
"""One for each way that is compared; with as many colors no two look alike."""


def _colors(count: int) -> list[Any]:
    """Colors that can be told from each other, the dark ones of each pair first."""
    from matplotlib import colormaps

    table = [colormaps["tab20"](at) for at in range(20)]
    return [(table[::2] + table[1::2])[at % len(table)] for at in range(count)]


def ranks_picture(
    path: Path, bars: Sequence[tuple[str, Sequence[int | None]]], memory: int, *, title: str = ""
) -> None:
    """What each rank of a pipeline needs as a picture: bars for each (name, bytes of each rank), the memory dashed.

    Raises:
        InvalidData: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = _figure()
    width = 0.8 / len(bars)
    for at, (name, sizes) in enumerate(bars):
        places = [rank + (at - (len(bars) - 1) / 2) * width for rank in range(len(sizes))]
        axes.bar(places, [(size or 0) / 2**20 for size in sizes], width, label=name)
    axes.axhline(memory / 2**20, color="crimson", linestyle="--", linewidth=1, label="memory")
    axes.set(xlabel="rank", ylabel="peak in MiB", title=title)
    axes.set_xticks(range(len(bars[0][1])))
    _save(figure, axes, path)


def _fitted(curve: Sequence[int], columns: int) -> list[int]:
    """The curve in at most so many columns, each the largest of what it stands for; a few ops are drawn broad."""
    if len(curve) <= columns:
        return [level for level in curve or [0] for _ in range(min(8, columns // max(1, len(curve))))]
    edges = [i * len(curve) // columns for i in range(columns + 1)]
    return [max(curve[a:b]) for a, b in pairwise(edges)]


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be written, before hours are spent on what it would show.

    Raises:
        InvalidData: matplotlib is not installed, it knows no such format, or there is no such folder.
    """
    if path is None:
        return
    check_writable(path)
    known = _figure()[0].canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InvalidData(f"{path} cannot be drawn: its name must end in one of .{', .'.join(sorted(known))}")


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidData("pictures need matplotlib; install remat[plot], or leave --png out") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InvalidData(f"{path} cannot be written: {error}") from None
