"""The page of what was found: a table a section, a row for each name, a line for each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.table import table

from .compare import Finding

TITLES = {
    "modules": (
        "Modules",
        "modules, all of torch's own `module_db`, in train mode, by inputs spread over those that torch has for it",
    ),
    "operators": (
        "Operators",
        "operators of torch's `op_db` that have a gradient in float32, by the first sample that fits",
    ),
    "architectures": (
        "Architectures",
        "architectures of `transformers` from shrunken configurations, with random weights and a loss",
    ),
}

INTRODUCTION = Path(__file__).with_name("page.md")


def page(found: Mapping[str, Sequence[Finding]], torch: str) -> str:
    """The whole page."""
    parts = [INTRODUCTION.read_text().strip().replace("{torch}", torch)]
    for section, findings in found.items():
        title, what = TITLES[section]
        endings = Counter(f.ending for f in findings)
        names = sorted({f.name for f in findings}, key=lambda name: (name.lower(), name))
        said = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        most = max((f.over_bytes for f in findings), default=0)
        parts.append(
            f"## {title}\n\n{len(findings)} samples of {len(names)} {what}: {said}; measured peaks are at most {most} "
            f"bytes above the predicted ones.\n\n{_rows(findings, names)}"
        )
        reasons = sorted({(f.name, f.ending, _cell(f.why)) for f in findings if f.why})
        if reasons:
            parts.append(table(("name", "ending", "why"), reasons))
    return "\n\n".join(parts) + "\n"


def _rows(findings: Sequence[Finding], names: Sequence[str]) -> str:
    columns = ("samples", "captured", "bitwise", "as eager", "refused", "differs", "not by aot_eager", "over")
    body = []
    for name in names:
        own = [f for f in findings if f.name == name]
        count = Counter(f.ending for f in own)
        captured = count["bitwise"] + count["as eager"] + count["differs"]
        cells = (len(own), captured, *(count[ending] for ending in columns[2:-1]))
        body.append((name, *cells, sum(f.over_bytes > 0 for f in own)))
    return table(("name", *columns), body)


def _cell(text: str) -> str:
    return "`" + text.replace("|", "/").replace("`", "'").replace("\n", " ") + "`"
