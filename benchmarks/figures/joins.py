"""Figures 8, 9 and 10 of RR-9273, Section 6, as data and pictures: `python -m benchmarks.figures.joins`."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness.picture import figure, save
from remat_solver.bounds import least_slots
from remat_solver.join.method import equivalent_plan
from remat_solver.join.table import JoinTable

Row = tuple[str, int, int, float, float]  # model, L or length, slots, x, y

MODELS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "CM": lambda size: (size, 5 * size),
    "SNN": lambda size: (2 * size, 2 * size, 2 * size),
    "RNN": lambda size: (6 * size,),
}
"""Two unequal branches, three equal ones and one chain, all of 6L steps: the least makespan is 12L + 1."""


def makespan(table: JoinTable, slots: int) -> int | None:
    """The makespan with unit costs, or None where nothing fits."""
    forward = table.forward_steps(slots)
    return None if forward is None else forward + sum(table.lengths) + 1


def figure_8(sizes: tuple[int, ...] = (5, 10, 15)) -> Iterator[Row]:
    """Makespan over the least one against slots over those that reach it, from c_min on."""
    for size in sizes:
        for model, lengths_of in MODELS.items():
            lengths = lengths_of(size)
            full = sum(lengths) + len(lengths)
            table = JoinTable(lengths, full)
            for slots in range(least_slots(lengths), full + 1):
                found = makespan(table, slots)
                assert found is not None
                yield model, size, slots, slots / full, found / (12 * size + 1)


def figure_9(slots: tuple[int, ...] = (7, 9, 11, 13), largest: int = 20) -> Iterator[Row]:
    """Makespan over the least one against L, for fixed slots."""
    for model, lengths_of in MODELS.items():
        for size in range(1, largest + 1):
            table = JoinTable(lengths_of(size), max(slots))
            for c in slots:
                found = makespan(table, c)
                if found is not None:
                    yield model, size, c, float(size), found / (12 * size + 1)


def figure_10(slots: tuple[int, ...] = (9, 12, 15), largest: int = 60) -> Iterator[Row]:
    """Makespan of the equivalent chain over the optimum, for three equal branches, against the length 2·ℓ + 1."""
    for length in range(2, largest // 2 + 1):
        lengths = (length,) * 3
        table = JoinTable(lengths, max(slots))
        for c in slots:
            best, plan = makespan(table, c), equivalent_plan(lengths, c)
            if best is not None and plan is not None:
                steps = sum(step.verb.value in ("F", "B", "turn") for step in plan.steps)
                yield "SNN", 2 * length + 1, c, float(2 * length + 1), steps / best


FIGURES: dict[str, tuple[Callable[[], Iterator[Row]], str, str]] = {
    "8": (figure_8, "slots / slots for the least makespan", "makespan / least makespan"),
    "9": (figure_9, "L", "makespan / least makespan"),
    "10": (figure_10, "length", "EQUIV-CHAIN / optimum"),
}


def threshold(rows: list[Row], level: float = 1.5) -> list[tuple[str, int, float]]:
    """For each model and L, the share of the slots from which on the makespan stays within `level`."""
    found: dict[tuple[str, int], float] = {}
    for model, size, _, x, y in rows:
        if y <= level:
            found[model, size] = min(x, found.get((model, size), x))
    return [(model, size, x) for (model, size), x in sorted(found.items())]


def draw(name: str, rows: list[Row], out: Path) -> None:
    """A picture of one figure: a panel for each L or number of slots."""
    key = 1 if name == "8" else 2
    panels = sorted({row[key] for row in rows})
    one = name == "10"
    drawn, axes = figure(1 if one else len(panels), size=(5 if one else 4, 3.4))
    for i, panel in enumerate(panels):
        axis = axes[0][0 if one else i]
        for model in MODELS:
            chosen = [row for row in rows if row[key] == panel and row[0] == model]
            if chosen:
                label = f"c = {panel}" if one else model
                axis.plot([row[3] for row in chosen], [row[4] for row in chosen], marker=".", ms=3, lw=1, label=label)
        if not one:
            axis.set_title(f"{'L' if name == '8' else 'c'} = {panel}")
        if name == "8":
            axis.axhline(1.5, color="gray", lw=0.5)
        axis.set_xlabel(FIGURES[name][1])
    axes[0][0].set_ylabel(FIGURES[name][2])
    axes[0][0].legend()
    save(drawn, out / f"join-figure-{name}.png")


def main() -> None:
    """Write the data and the pictures, and print what they show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("join-out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, (make, _, _) in FIGURES.items():
        rows = list(make())
        with (out / f"join-figure-{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("model", "length" if name == "10" else "L", "slots", "x", "y"))
            writer.writerows(rows)
        draw(name, rows, out)
        if name == "8":
            for model, size, share in threshold(rows):
                print(f"figure 8: {model} L={size}: within 1.5 of the least makespan from {share:.0%} of the slots on")
            for model, size, slots, _, y in rows:
                if slots == least_slots(MODELS[model](size)) + 2:
                    print(f"figure 8: {model} L={size}: {y:.2f} of the least makespan at c_min + 2 = {slots} slots")
        else:
            worst = max(rows, key=lambda row: row[4])
            print(f"figure {name}: largest ratio {worst[4]:.2f} ({worst[0]}, {int(worst[3])}, {worst[2]} slots)")
    print(f"wrote {out}/join-figure-{{8,9,10}}.csv and .png")


if __name__ == "__main__":
    main()
