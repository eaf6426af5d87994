"""Tables and the picture of the client's benchmark, from what its children wrote."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.harness.picture import figure, save
from benchmarks.harness.table import csv_text, table

Found: TypeAlias = Mapping[str, Any]

PLAIN_PLAN = "remat plain"
RESAMPLES = 2000
FEWEST_ROUNDS = 2
RESULTS = Path(__file__).parents[1] / "results"
DOCS = Path(__file__).parents[2] / "docs" / "figures"
MIB = 2**20


class Ratio(NamedTuple):
    """The median of a ratio over rounds, and its 95 % interval by bootstrap over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def ratio(one: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """How one way's times compare with another's in the same rounds; None where there are none."""
    pairs = [a / b for a, b in zip(one, other, strict=False)]
    return interval(pairs) if pairs else None


def interval(values: Sequence[float]) -> Ratio:
    """The median and its bootstrap interval, the same each time."""
    draw = random.Random(0)
    found = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(values), found[RESAMPLES // 40], found[-1 - RESAMPLES // 40])


def read(folder: Path, names: Iterable[str]) -> list[Found]:
    """What is known of each model, those with too few rounds left out."""
    files = [folder / f"{name}.json" for name in names]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    return [model for model in found if model.get("rounds", 0) >= FEWEST_ROUNDS]


def rows(model: Found) -> list[dict[str, Any]]:
    """One row for each way to train a model."""
    ways: Mapping[str, Any] = model["ways"]
    duels, found = _duels(model), []
    for name, way in ways.items():
        row: dict[str, Any] = {"model": model["model"], "way": name, "error": way.get("error", "")}
        if "error" not in way:
            rival = _rival(model, name)
            over = ratio(way["seconds"], ways["plain"]["seconds"])
            row |= {
                "peak_bytes": way["peak_bytes"],
                "median_ms": round(1000 * statistics.median(way["seconds"]), 2),
                **_columns("over_plain", over),
                "remat_at_its_peak": rival,
                **_columns("remat_over_it", duels.get(name)),
                "budget_bytes": way.get("budget_bytes", ""),
                "predicted_peak_bytes": way.get("predicted_bytes", ""),
                "predicted_ms": round(way["predicted_ns"] / 1e6, 2) if "predicted_ns" in way else "",
                "solver_gap": way.get("gap", ""),
                "nodes": way.get("nodes", ""),
                "unequal_gradients": way["unequal_gradients"],
                "unequal_buffers": way["unequal_buffers"],
                "unequal_to_aot_eager": way.get("unequal_to_aot_eager", ""),
                "gradient_error": f"{way['gradient_error']:.1e}",
                "rounds": len(way["seconds"]),
            }
        found.append(row)
    return found


def _columns(name: str, found: Ratio | None) -> dict[str, Any]:
    parts = ("", "", "") if found is None else tuple(round(part, 4) for part in found)
    return dict(zip((name, f"{name}_low", f"{name}_high"), parts, strict=True))


def write(models: Sequence[Found], out: Path) -> None:
    """The CSV, the picture and the page."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [row for model in models for row in rows(model)]
    (out / "client.csv").write_text(csv_text(lines))
    picture(models, out / "client.png")
    if out == RESULTS:
        (DOCS / "client.png").write_bytes((out / "client.png").read_bytes())
    (out / "client.md").write_text(page(models))


def spread(values: Sequence[float]) -> str:
    """From the least to the most."""
    return f"{min(values):g} to {max(values):g}"


def page(models: Sequence[Found]) -> str:
    """The results as markdown."""
    states = [model["state"] for model in models]
    loads = [state["load"] for state in states]
    state = states[-1]
    versions = ", ".join(map(" ".join, state["versions"]))
    parts = [
        "# The client, measured",
        f"`python -m benchmarks.training`, ended {max(s['date'] for s in states)}; {state['cores']} cores, "
        f"{state['threads']} thread, {versions}, load average {spread(loads)} "
        f"where a model ended, {spread([model['rounds'] for model in models])} rounds.",
        HOW,
        verdict(models),
        "![Step time against measured peak](client.png)",
        "## What running by a plan costs, and what was predicted",
        table(list(SUMMARY), [[text(model) for text in SUMMARY.values()] for model in models]),
        AFTER_SUMMARY,
        "## At equal peak",
        BEFORE_PAIRS,
        *(part for model in models for part in (f"### {model['title']}", pairs(model))),
    ]
    return "\n\n".join(parts) + "\n"


HOW = """Each model trains one batch, from a transformers or diffusers config with random weights. Each way to train it
takes one step a round, in an order drawn anew, in one process of one thread. A time is CPU seconds of that process:
other work on the machine disturbs it only through the caches. A ratio is the median over the rounds of the ratio within
a round, with its 95 % bootstrap interval. The C library is told to keep freed pages, as CUDA's allocator does. A peak
is the most bytes above parameters, buffers and inputs in one step, gradients included, by the allocator's own events.
No GPU was measured."""

AFTER_SUMMARY = """"Over aot_eager" is remat with nothing recomputed against `torch.compile(backend="aot_eager")`, which
recomputes some cheap kernels of itself; "each once" is the same joint graph without that, run by aot_eager's own code.
A node is one call of the generated code, views included; what it costs is the difference of two steps over the number
of nodes, on a tiny model of the same kind, where kernels take next to nothing. "Time" compares the sum of the profiled
kernels with the measured step, over all of remat's plans (median, worst); "slowdown" the predicted with the measured
ratio to remat's own plain plan; "peak" the predicted with the measured peak."""

BEFORE_PAIRS = """Beside each way stands remat with that way's measured peak as its budget. "remat / it" below 1: remat
is faster. It is bold where the interval holds 1 or lies above it. Gradients are compared with plain training's."""


def verdict(models: Sequence[Found]) -> str:
    """How remat fared at equal peak, in numbers."""
    duels = [duel for model in models for duel in _duels(model).values()]
    faster, slower = sum(duel.high < 1 for duel in duels), sum(duel.low > 1 for duel in duels)
    wrong = [f"{m['title']} {n}" for m in models for n, w in m["ways"].items() if w.get("gradient_error", 0) > 1e-3]
    mine = [way for model in models for name, way in model["ways"].items() if name.startswith("remat")]
    exact = sum(way.get("unequal_to_aot_eager") == 0 for way in mine)
    lines = [
        f"At the peak of another way remat is faster in {faster} of {len(duels)} pairs, equal within the "
        f"interval in {len(duels) - faster - slower}, slower in {slower}; the median ratio is "
        f"{statistics.median(duel.median for duel in duels):.3f}."
        if duels
        else "",
        f"Loss, gradients, buffers and generator: `aot_eager`'s bit for bit in {exact} of {len(mine)} plans.",
        f"Gradients off by more than 1e-3 of their largest entry: {', '.join(wrong)}." if wrong else "",
    ]
    return " ".join(line for line in lines if line)


def _duels(model: Found) -> dict[str, Ratio]:
    """By way: the time of the plan within its peak over its own, where both were timed."""
    ways = model["ways"]
    found = {}
    for name, way in ways.items():
        duel = ratio(ways.get(_rival(model, name), {}).get("seconds", ()), way.get("seconds", ()))
        if duel is not None:
            found[name] = duel
    return found


def _rival(model: Found, name: str) -> str:
    """The plan that stands next to a way, where there is one for its peak."""
    ways = model["ways"]
    if name == "plain" and ways["plain"]["peak_bytes"] >= 0.999 * model["plain_bytes"]:
        return PLAIN_PLAN
    return str(ways[name].get("rival", ""))


def pairs(model: Found) -> str:
    """One model's ways, remat's next to each."""
    ways = model["ways"]
    duels = _duels(model)
    body = []
    for name, way in ways.items():
        if name.startswith("remat"):
            continue
        if "error" in way:
            body.append([name, "–", "–", "–", "–", "–", f"does not run: {way['error'][:80]}"])
            continue
        rival = ways.get(_rival(model, name), {})
        theirs = ratio(rival.get("seconds", ()), ways["plain"]["seconds"])
        duel = duels.get(name)
        said = "" if duel is None else str(duel) if duel.high < 1 else f"**{duel}**"
        body.append(
            [
                name,
                _mib(way["peak_bytes"]),
                str(ratio(way["seconds"], ways["plain"]["seconds"])),
                _mib(rival["peak_bytes"]) if "peak_bytes" in rival else rival.get("error", "–").split(":")[0],
                "–" if theirs is None else str(theirs),
                said,
                _gradients(way),
            ]
        )
    return table(
        ("way", "peak, MiB", "time / plain", "remat: peak", "time / plain", "remat / it", "its gradients"), body
    )


def _gradients(way: Found) -> str:
    buffers = f", {way['unequal_buffers']} buffers differ" if way["unequal_buffers"] else ""
    if not way["unequal_gradients"]:
        return "bitwise" + buffers
    wrong = "**wrong**: " if way["gradient_error"] > 1e-3 else ""
    return f"{wrong}off by {way['gradient_error']:.0e}{buffers}"


TIME, SLOWDOWN, PEAK = range(3)


def predictions(model: Found) -> list[tuple[float, float, float]]:
    """For each plan of remat's, predicted / measured − 1 of its time, its slowdown over the plain plan and its peak."""
    ways = model["ways"]
    plain = ways[PLAIN_PLAN]
    found = []
    for name, way in ways.items():
        if name.startswith("remat") and way.get("seconds"):
            slowdown = ratio(way["seconds"], plain["seconds"])
            assert slowdown is not None
            found.append(
                (
                    way["predicted_ns"] / 1e9 / statistics.median(way["seconds"]) - 1,
                    way["predicted_ns"] / plain["predicted_ns"] / slowdown.median - 1,
                    way["predicted_bytes"] / way["peak_bytes"] - 1,
                )
            )
    return found


def _errors(model: Found, place: int) -> str:
    found = [100 * row[place] for row in predictions(model)]
    digits = 2 if place == PEAK else 1
    return f"{statistics.median(found):+.{digits}f}, {max(found, key=abs):+.{digits}f} %".replace("-0.00", "0.00")


def _node(model: Found, other: str) -> str:
    tiny = model.get("tiny")
    if tiny is None or other not in tiny["seconds"]:
        return "–"
    mine, theirs = tiny["seconds"][PLAIN_PLAN], tiny["seconds"][other]
    found = interval([(a - b) / tiny["nodes"] * 1e6 for a, b in zip(mine, theirs, strict=True)])
    return f"{found.median:+.2f} ({found.low:+.2f}–{found.high:+.2f})"


def _over(model: Found, other: str) -> str:
    ways = model["ways"]
    found = ratio(ways[PLAIN_PLAN]["seconds"], ways[other].get("seconds", ()))
    return "–" if found is None else str(found)


SUMMARY: dict[str, Callable[[Found], str]] = {
    "model": lambda m: str(m["title"]),
    "parameters, inputs; plain step, MiB": lambda m: (
        f"{_mib(m['fixed_bytes'])}; {_mib(m['ways']['plain']['peak_bytes'])}"
    ),
    "plain step, ms": lambda m: f"{1000 * statistics.median(m['ways']['plain']['seconds']):.0f}",
    "over aot_eager": lambda m: _over(m, "aot_eager"),
    "over each once": lambda m: _over(m, "each once"),
    "µs a node over aot_eager": lambda m: _node(m, "aot_eager"),
    "µs a node over each once": lambda m: _node(m, "each once"),
    "time: predicted / measured − 1": lambda m: _errors(m, TIME),
    "slowdown": lambda m: _errors(m, SLOWDOWN),
    "peak": lambda m: _errors(m, PEAK),
    "kernels profiled": lambda m: f"{m['signatures']} of {m['kernels']}",
}


def _mib(size: float) -> str:
    return f"{size / MIB:.1f}"


LOOKS = {
    "plain": ("black", "o"),
    "aot_eager": ("tab:purple", "D"),
    "checkpoint": ("tab:red", "s"),
    "selective": ("tab:orange", "^"),
}


def picture(models: Sequence[Found], file: Path) -> None:
    """Step time over plain training's against measured peak, one panel a model."""
    drawn, axes = figure(len(models), -(-len(models) // 4), (4.2, 3.6))
    for axis, model in zip(axes.flat, models, strict=False):
        panel(axis, model)
    drawn.axes[0].legend(frameon=False, fontsize=7)
    drawn.supxlabel("measured peak of a step above parameters and inputs, MiB")
    drawn.supylabel("step time / plain step time")
    save(drawn, file)


def panel(axes: Any, model: Found) -> None:
    """One model's points, and remat's as a line."""
    ways = model["ways"]

    def place(name: str) -> tuple[float, Ratio]:
        found = ratio(ways[name]["seconds"], ways["plain"]["seconds"])
        assert found is not None
        return ways[name]["peak_bytes"] / MIB, found

    timed = [name for name, way in ways.items() if way.get("seconds")]
    settings = [name for name in timed if name.startswith("amb")]
    for label, names, color, marker, line in (
        ("activation_memory_budget", settings, "tab:green", "v", "none"),
        ("remat", [n for n in timed if n.startswith("remat")], "tab:blue", "o", "-"),
        *((name, [name], *LOOKS[name], "none") for name in LOOKS if name in timed),
    ):
        points = sorted(place(name) for name in names)
        if points:
            errors = [[p.median - p.low for _, p in points], [p.high - p.median for _, p in points]]
            axes.errorbar(
                [x for x, _ in points],
                [p.median for _, p in points],
                yerr=errors,
                color=color,
                marker=marker,
                markersize=5,
                linestyle=line,
                linewidth=1.2,
                elinewidth=0.8,
                label=label,
            )
    axes.set_title(model["title"], fontsize=10)
    axes.set_xlim(0, None)
    axes.grid(alpha=0.25)
