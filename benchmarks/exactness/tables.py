"""The page of what was found: a sentence a section, and a row for each name of which not all is equal."""

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

LONGEST_REASON = 80
"""Letters of a reason that the page shows; the data file has all of it."""

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
        text = (
            f"{len(findings)} samples of {len(names)} {what}: {said}; measured peaks are at most {most} "
            f"bytes above the predicted ones. All of them are in `benchmarks/results/exactness-{section}.jsonl`."
        )
        rest = sorted({(f.name, f.ending, _cell(f.why)) for f in findings if f.ending != "bitwise"})
        if rest:
            text += f"\n\nThose that are not bitwise:\n\n{table(('name', 'ending', 'why'), rest)}"
        parts.append(f"## {title}\n\n<!-- {section}: begin -->\n\n{text}\n\n<!-- {section}: end -->")
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    words = text.removeprefix("CaptureError: Loss cannot be captured as one graph: ")
    words = words.replace("|", "/").replace("`", "'").replace("\n", " ")
    if not words:
        return ""
    return f"`{words if len(words) <= LONGEST_REASON else words[:LONGEST_REASON].rstrip() + ' …'}`"
