"""`python -m benchmarks.exactness`: torch's samples and architectures by plans, next to stock `aot_eager`.

    python -m benchmarks.exactness modules|operators|architectures|tables [--most N] [--part I/N] [--only NAME ...]

The first three add what they find to `benchmarks/results/exactness-*.jsonl`, a sample a line; `tables` makes
`docs/exactness.md` of these files. With `--only`, samples of these names take the places of those that are there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.harness.rows import add_row, read_rows
from benchmarks.harness.table import table

from .architectures import architecture_samples
from .compare import Finding, Sample, compared, quick_profiles
from .torch_samples import MODULE_SAMPLES, module_samples, operator_samples

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = {
    "modules": "modules, all of torch's own `module_db`, in train mode, by inputs spread over those that torch has for "
    "it",
    "operators": "operators of torch's `op_db` that have a gradient in float32, by the first sample that fits",
    "architectures": "architectures of `transformers` from shrunken configurations, with random weights and a loss",
}
"""And what their samples are of."""

LONGEST_REASON = 80
"""Letters of a reason that the page shows; the data file has all of it."""

INTRODUCTION = Path(__file__).with_name("page.md")


def samples(section: str, most: int = MODULE_SAMPLES) -> Iterable[Sample]:
    """The samples of a section; `most` bounds those of each module."""
    if section == "modules":
        return module_samples(most)
    return operator_samples() if section == "operators" else architecture_samples()


def page(found: Mapping[str, Sequence[Finding]], torch: str) -> str:
    """The whole page."""
    parts = [INTRODUCTION.read_text().strip().replace("{torch}", torch)]
    for section, findings in found.items():
        endings = Counter(f.ending for f in findings)
        names = sorted({f.name for f in findings}, key=lambda name: (name.lower(), name))
        said = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        most = max((f.over_bytes for f in findings), default=0)
        text = (
            f"{len(findings)} samples of {len(names)} {SECTIONS[section]}: {said}; measured peaks are at most {most} "
            f"bytes above the predicted ones. All of them are in `benchmarks/results/exactness-{section}.jsonl`."
        )
        rest = sorted({(f.name, f.ending, _cell(f.why)) for f in findings if f.ending != "bitwise"})
        if rest:
            text += f"\n\nThose that are not bitwise:\n\n{table(('name', 'ending', 'why'), rest)}"
        parts.append(f"## {section.capitalize()}\n\n<!-- {section}: begin -->\n\n{text}\n\n<!-- {section}: end -->")
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    words = text.removeprefix("CaptureError: Loss cannot be captured as one graph: ")
    words = words.replace("|", "/").replace("`", "'").replace("\n", " ")
    if not words:
        return ""
    return f"`{words if len(words) <= LONGEST_REASON else words[:LONGEST_REASON].rstrip() + ' …'}`"


def main() -> None:
    """Run a section, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*SECTIONS, "tables"))
    parser.add_argument("--most", type=int, default=MODULE_SAMPLES, help="samples of each module; torch has up to 150")
    parser.add_argument("--part", default="1/1", help="every N-th sample from the I-th on, as 2/4: runs next to others")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="samples of these names alone, measured again")
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    if given.what == "tables":
        found = {section: read(RESULTS / f"exactness-{section}.jsonl") for section in SECTIONS}
        (ROOT / "docs" / "exactness.md").write_text(page(found, torch.__version__))
        return
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    quick_profiles()
    path = RESULTS / f"exactness-{given.what}.jsonl"
    if given.only:
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["name"] not in given.only]
        path.write_text("".join(f"{line}\n" for line in kept))
    for sample in itertools.islice(samples(given.what, given.most), first - 1, None, step):
        if given.only and sample.name not in given.only:
            continue
        finding = compared(sample)
        add_row(path, finding._asdict())
        print(*finding, flush=True)


def read(path: Path) -> list[Finding]:
    """What a run found."""
    return [Finding(**row) for row in read_rows(path)]


if __name__ == "__main__":
    main()
