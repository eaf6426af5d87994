"""What the papers print in numbers, next to ours from the measured files: the rows of docs/papers.md that have both."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from benchmarks.figures.draw import (
    APPROXIMATIONS,
    NAMES,
    PAPER_LARGEST,
    PAPER_RATIOS,
    accounted,
    headline,
    over_best,
    overhead,
    rows_of,
    stopped,
)
from benchmarks.harness.table import head

Sense: TypeAlias = Literal["more", "less", "same", "at most"]

SOURCE = Path(__file__).parent / "papers.md"
PAGE = Path(__file__).parents[2] / "docs" / "papers.md"

EQUAL, NEAR = 0.005, 0.10
"""Shares of the paper's value within which ours is called equal, or near."""


class Claim(NamedTuple):
    """A number of a paper and ours.

    Attributes:
        what: where it stands, and what it is.
        paper, ours: the numbers.
        sense: which of two numbers is better, or "at most" where the paper's is a limit that ours keeps or not.
        show: how both are written.
        shown_by: the command and the file.
        said: what the paper's cell says besides the number.
        because: what is known of the difference.
        mark: "*" where ours ended on a time limit.
    """

    what: str
    paper: float
    ours: float
    sense: Sense
    show: str
    shown_by: str
    said: str = ""
    because: str = ""
    mark: str = ""

    @property
    def verdict(self) -> str:
        """One of "equal", "near", "better" and "not"."""
        if self.sense == "at most":
            return "equal" if self.ours <= self.paper else "not"
        share = self.ours / self.paper - 1
        if abs(share) <= EQUAL:
            return "equal"
        if (self.sense == "more" and share > 0) or (self.sense == "less" and share < 0):
            return "better"
        return "near" if abs(share) <= NEAR else "not"

    def row(self) -> str:
        """The row of the page."""
        paper = self.show.format(self.paper) + (f", {self.said}" if self.said else "")
        ours = self.show.format(self.ours) + self.mark + (f". {self.because}" if self.because else "")
        return f"| {self.what} | {paper} | {ours} | {self.verdict} | {self.shown_by} |"


def _by(command: str, file: str) -> str:
    return f"`python -m benchmarks.{command}`, `{file}`"


READING = "16 GB, input free"
_REASONS = {
    "fcn8": "61 in 16 GiB",
    "segnet": "65 in 16 GiB",
    "resnet50": "the paper's program was stopped; a closed formula (AP greedy) has more than its value, too",
}


def batches(folder: Path) -> Iterator[Claim]:
    """Checkmate, Figure 6 and its headline."""
    rows = [row for row in rows_of(folder, "batches") if row["memory"] == READING]
    shown = _by("figures batches", "benchmarks/results/figures/batches.csv")
    for method in ("auto", "milp"):
        for network, paper in PAPER_LARGEST.items():
            for row in rows:
                if (row["network"], row["method"]) == (network, method):
                    proved = "proved" if row["batch"] == row["bound"] else f"at most {row['bound']}"
                    reason = _REASONS.get(network, "") if method == "auto" else ""
                    because = "; ".join(filter(None, (proved[0].upper() + proved[1:], reason)))
                    what = f"Figure 6: {NAMES[network]}, `{method}`"
                    mark = stopped(row)
                    yield Claim(what, paper, int(row["batch"]), "more", "{:.0f}", shown, "", because, mark)
    for network, paper, over, words in (
        ("mobilenet", 5.1, ("checkpoint-all",), "checkpoint-all"),
        ("unet", 2.6, (), "the best baseline"),
        ("mobilenet", 2.19, (), "the best baseline"),
    ):
        ours = headline(rows, network, "paper", over)
        freed = headline(rows, network, "", over)
        if ours is not None and freed is not None:
            because = "" if over else f"{freed:.2f} with each value freed after its last use"
            what = f"5.3: times the largest batch of {words}, {NAMES[network]}"
            yield Claim(what, paper, ours, "more", "{:.2f}", shown, "", because)


def tradeoff(folder: Path) -> Iterator[Claim]:
    """Checkmate, Figure 4 and what its Section 5.3 says of it."""
    rows = rows_of(folder, "tradeoff")
    shown = _by("figures tradeoff", "benchmarks/results/figures/tradeoff.csv")
    unet = [row for row in accounted(rows, "paper") if row["network"] == "unet"]
    budget = min({row["budget_bytes"] for row in unet}, key=lambda size: abs(int(size) - 16e9), default="")
    at = {row["method"]: overhead(row) for row in unet if row["budget_bytes"] == budget}
    for method, paper in (("linearized-greedy", 1.20), ("linearized-sqrt", 1.38)):
        best, other = at.get("auto"), at.get(method)
        if best is not None and other is not None:
            what = f"Figure 4c: U-Net, 16 GB, times faster than {method}"
            because = f"At {int(budget) / 1e9:.2f} GB, by a roofline; the paper's costs are a profile"
            yield Claim(what, paper, (1 + other) / (1 + best), "more", "{:.2f}", shown, "", because)
    if at.get("auto") is not None:
        ours = 100 * (at["auto"] or 0)
        yield Claim("5.3: overhead in % of U-Net at 16 GB", 10, ours, "at most", "{:.2f}", shown, "as a limit")
    beaten = sum(
        (overhead(other) or 0) < (overhead(row) or 0) - 1e-3
        for row in rows
        if row["method"] == "auto" and row["cost"]
        for other in rows
        if other["cost"] and (other["network"], other["budget_bytes"]) == (row["network"], row["budget_bytes"])
    )
    if rows:
        what = "Figure 4: plans cheaper than ours by another method"
        yield Claim(what, 0, beaten, "at most", "{:.0f}", shown, "lowest everywhere")


def ratios(folder: Path) -> Iterator[Claim]:
    """Checkmate, Table 2 of the printed version."""
    rows, shown = rows_of(folder, "ratios"), _by("figures ratios", "benchmarks/results/figures/ratios.csv")
    for network, printed in PAPER_RATIOS.items():
        mine = [row for row in rows if row["network"] == network]
        budgets = len({row["budget_bytes"] for row in mine})
        for method, paper in zip(APPROXIMATIONS, printed, strict=True):
            ours, count, mark = over_best(mine, method, "paper")
            sense: Sense = "less" if method == "lp-rounding" else "same"
            if paper != "–" and count:
                what = f"Table 2 (printed version): {NAMES[network]}, {method}"
                because = f"{count} of {budgets} budgets"
                yield Claim(what, float(paper), ours, sense, "{:.2f}", shown, "", because, mark)


def times(folder: Path) -> Iterator[Claim]:
    """Checkmate, Section 5.2: most within minutes, at most an hour."""
    shown = _by("figures times", "benchmarks/results/figures/times.csv")
    for row in rows_of(folder, "times"):
        if row["method"] == "milp":
            gap = 100 * (1 - int(row["bound"] or row["once"]) / int(row["cost"])) if row["cost"] else 100
            network, size = NAMES[row["network"]], int(row["budget_bytes"]) / 1e9
            what = f"5.2: gap of the paper's program in %, {network}, {size:.2f} GB"
            because = f"{float(row['seconds']):.1f} s, {row['ops']} ops"
            yield Claim(what, 0.1, gap, "at most", "{:.2f}", shown, "solved in an hour", because, stopped(row))


def memory(folder: Path) -> Iterator[Claim]:
    """RR-9273, Tables 1 and 2: the cell that is furthest from the paper's."""
    shown = _by("figures.memory", "benchmarks/results/figures/memory.csv")
    with (folder / "memory.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for what, key in (("Table 1: weights", "weights"), ("Table 2: activations at batch 1", "activations")):
        row = max(rows, key=lambda row: abs(float(row[key]) / float(row[f"paper_{key}"]) - 1))
        words = f"of {row['network']}" + (f" at {row['image']}²" if key == "activations" else "")
        because = f"The furthest of {len(rows) if key == 'activations' else len({r['network'] for r in rows})}"
        paper, ours = float(row[f"paper_{key}"]), float(row[key])
        yield Claim(f"{what} {words}, MiB", paper, ours, "same", "{:.0f}", shown, "", because)


def joins(folder: Path) -> Iterator[Claim]:
    """RR-9273, Figures 8 and 9."""

    def points(figure: int) -> list[Mapping[str, str]]:
        with (folder / f"join-figure-{figure}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    names = {"CM": "two branches", "SNN": "three branches", "RNN": "one chain"}
    eight, nine = points(8), points(9)
    shown = _by("figures.joins", "benchmarks/results/figures/join-figure-8.csv")
    for model, words in names.items():
        mine = [row for row in eight if row["model"] == model and int(row["L"]) >= 10]
        if model != "RNN":
            half = max(
                min((r for r in mine if r["L"] == size), key=lambda r: abs(float(r["x"]) - 0.5))["y"]
                for size in ("10", "15")
            )
            what = f"Figure 8: makespan with half of the slots, {words}"
            yield Claim(
                what, 1.25, float(half), "same", "{:.2f}", shown, "approximately", "The larger of L = 10 and 15"
            )
        by_slots = sorted(mine, key=lambda r: int(r["slots"]))
        second = max(float([r["y"] for r in by_slots if r["L"] == size][2]) for size in ("10", "15"))
        because = "" if second <= 2 else "Proved: the program is exact"
        yield Claim(f"Figure 8: at c_min + 2, {words}", 2, second, "at most", "{:.2f}", shown, "as a limit", because)
    shown = _by("figures.joins", "benchmarks/results/figures/join-figure-9.csv")
    worst = max(float(row["y"]) for row in nine if row["slots"] == "11")
    yield Claim("Figure 9: ratio at c = 11", 2, worst, "at most", "{:.2f}", shown, "as a limit")


def rotor(folder: Path) -> Iterator[Claim]:
    """RR-9302, Sections 5.3 and 5.4: what was trained in narrow form, and what was profiled as it is."""
    from benchmarks.training.rotor import ROWS, groups_of, read, summary

    ran = [summary(rows) for rows in read(ROWS)]
    whole = [summary(rows) for rows in groups_of({**row, "model": row["network"]} for row in rows_of(folder, "rotor"))]
    trained = _by("training.rotor", "benchmarks/results/rotor.csv")
    for what, paper, ours, sense, shown in (
        ("5.3: error of predicted time, %", 7.8, [one.time_error or 0 for one in ran], "less", trained),
        ("5.3: error of predicted peak, %", 3.7, [one.peak_error or 0 for one in ran], "less", trained),
        ("5.4: gain over sequential's best, %, narrow", 17.2, [one.gain_best or 0 for one in ran], "more", trained),
        (
            "5.4: the same by verified makespans, in full width",
            17.2,
            [one.gain_predicted for one in whole],
            "more",
            _by("figures rotor", "benchmarks/results/figures/rotor.csv"),
        ),
    ):
        if ours:
            because = f"{100 * min(ours):.1f} to {100 * max(ours):.1f} by network"
            mean = 100 * statistics.mean(ours)
            yield Claim(what, paper, mean, sense, "{:.1f}", shown, "on average", because)


CLAIMS: Mapping[str, tuple[Callable[[Path], Iterator[Claim]], ...]] = {
    "checkmate": (times, tradeoff, batches, ratios),
    "rotor": (rotor,),
    "joins": (memory, joins),
}
"""Where the source of the page says `{name}`, the table of these stands."""
HEAD = ("what", "paper", "here", "verdict", "shown by")


def page(source: str, folder: Path) -> str:
    """The page from its source, in which `{name}` alone in a line stands for a table of claims."""
    for name, makers in CLAIMS.items():
        rows = [claim.row() for make in makers for claim in make(folder)]
        text = "\n".join([f"<!-- {name}: begin -->\n", head(HEAD), *rows, f"\n<!-- {name}: end -->"])
        source = source.replace(f"\n{{{name}}}\n", f"\n{text}\n")
    return source
