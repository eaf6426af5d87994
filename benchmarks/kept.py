"""`python -m benchmarks.kept`: captures that one process keeps and another finds, for every architecture there is.

    python -m benchmarks.kept [--only NAME ...]

The first process captures the tiny models of the zoo and the architectures of transformers (`benchmarks.exactness`),
all in one process, with REMAT_KEEP_CAPTURES=1 for captures of any length. The second does the same, and captures each
once more without the setting. The table counts what was kept, and what of it the second
process has found; whose graph is the one of the trace; and whose gradients, losses and buffers of two steps by a plan
that recomputes are bitwise those of the traced one.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.exactness.architectures import architecture_samples
from benchmarks.exactness.compare import Loss, Sample, by_plan, differences, quick_profiles, said, trained
from benchmarks.models.zoo import build, named
from remat import CaptureError
from remat.capture import kept
from remat.capture.trace import capture
from remat.training.step import training_step
from remat_ir.greedy import least_memory

HEAD = ("", "models", "refused by capture", "kept", "found", "same graph", "bitwise", "CPU s traced", "CPU s found")


def samples(part: str) -> Iterator[Sample]:
    """The models of a part: the zoo's or those of transformers."""

    def zoo(name: str) -> Any:
        subject = build(name)
        return subject.model, (), dict(subject.inputs)

    return (Sample(n, partial(zoo, n)) for n in named("tiny")) if part == "zoo" else architecture_samples()


PARTS = ("zoo", "transformers")


class Said(logging.Handler):
    """What the client logs of kept captures."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a line."""
        self.lines.append(record.getMessage())

    def why_not(self) -> str:
        """Why a capture was not kept; empty where it was."""
        return next((line for line in self.lines if "is not kept" in line), "").partition(": ")[2]

    def found(self) -> bool:
        """Whether a capture was found."""
        return any("was captured before" in line for line in self.lines)


def captured(sample: Sample, again: bool, log: Said) -> dict[str, Any]:
    """What a process says of a model; never raises what the model raises."""
    log.lines.clear()
    torch.manual_seed(0)
    made, args, kwargs = sample.make()
    module = Loss(made)
    began = time.process_time()
    try:
        capture(module, args, kwargs)
    except CaptureError as error:
        return {"refused": said(error)}
    row: dict[str, Any] = {"seconds": time.process_time() - began, "why": log.why_not(), "found": log.found()}
    if again and row["found"]:
        kept_step = training_step(module, args, kwargs)
        os.environ["REMAT_KEEP_CAPTURES"] = "0"
        try:
            step = training_step(module, args, kwargs)
            row["graph"] = kept.same(step.captured.descriptor, kept_step.captured.descriptor)
        finally:
            os.environ["REMAT_KEEP_CAPTURES"] = "1"
        results = []
        for one in (step, kept_step):
            planned = copy.deepcopy(module)
            call = by_plan(planned, one, least_memory(one.graph))
            results.append(trained(planned, call, args, kwargs))
        row["bitwise"] = not differences(*results)
    return row


def process(again: bool, only: list[str]) -> None:
    """One of the two processes: a row for each model, printed as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    quick_profiles()
    kept.KEPT_FROM_S = 0.0
    log = Said()
    client = logging.getLogger("remat")
    client.setLevel(logging.INFO)
    client.addHandler(log)
    client.propagate = False
    every = [(part, sample) for part in PARTS for sample in samples(part) if not only or sample.name in only]
    for part, sample in every:
        try:
            row = captured(sample, again, log)
        except Exception as error:
            row = {"refused": f"raw error: {said(error)}"}
        print(json.dumps({"part": part, "name": sample.name, **row}), flush=True)


def lines(first: Mapping[tuple[str, str], Any], second: Mapping[tuple[str, str], Any]) -> Iterator[str]:
    """The table, and each model that is not kept, not found or not the same."""
    yield f"| {' | '.join(HEAD)} |\n| {' | '.join('---' for _ in HEAD)} |"
    reasons: Counter[str] = Counter()
    for part in PARTS:
        rows = [(one, second[key]) for key, one in first.items() if key[0] == part]
        good = [(one, two) for one, two in rows if "refused" not in one]
        kept_ones = [(one, two) for one, two in good if not one["why"]]
        found = [(one, two) for one, two in kept_ones if two.get("found")]
        numbers = [len(rows), len(rows) - len(good), len(kept_ones), len(found)]
        numbers += [sum(bool(two[what]) for _, two in found) for what in ("graph", "bitwise")]
        seconds = [sum(row["seconds"] for row in rows) for rows in zip(*found, strict=True)]
        yield f"| {part} | {' | '.join(map(str, numbers))} | {' | '.join(f'{s:.0f}' for s in seconds)} |"
        reasons.update(one["why"] for one, _ in good if one["why"])
    for why, count in reasons.most_common():
        yield f"not kept: {count}: {why}"
    for key, one in first.items():
        two = second[key]
        if "refused" in one or one["why"]:
            yield f"{key[1]}: {re.sub(r'0x[0-9a-f]+', '…', one.get('refused') or one['why'])}"
        elif not (two.get("found") and two["graph"] and two["bitwise"]):
            yield f"{key[1]}: {two}"


def main() -> None:
    """Run both processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="models of these names alone")
    parser.add_argument("--process", choices=("first", "second"), help="one of the two alone, whose rows are printed")
    given = parser.parse_args()
    if given.process:
        process(given.process == "second", given.only)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "REMAT_KEEP_CAPTURES": "1", "REMAT_CACHE_DIR": folder, "REMAT_OFFLINE": "1"}
        found: list[dict[tuple[str, str], Any]] = []
        for which in ("first", "second"):
            command = [sys.executable, "-m", "benchmarks.kept", "--process", which]
            command += ["--only", *given.only] if given.only else []
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
            found.append({(row["part"], row["name"]): row for row in rows})
        size = sum(path.stat().st_size for path in Path(folder).glob("captures/*"))
    print(*lines(*found), f"{size / 2**20:.1f} MiB of captures", sep="\n")


if __name__ == "__main__":
    main()
