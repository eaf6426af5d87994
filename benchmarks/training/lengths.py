"""What a new length costs, in random order (`python -m benchmarks.training.lengths`): processor time and memory.

GPT-2 from a config (64 wide, random tokens, two sequences a batch), a greedy plan for four fifths of what plain
training needs. Each way to train is a process of its own with one thread. A length costs what its first step takes,
in processor time of the process, less the time of the step when it comes again. Memory is that of the process, above
what the first four lengths have left. A run that was cut short goes on with the ways that have no line in `--raw`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import remat
from benchmarks.harness.machine import machine
from benchmarks.harness.rows import add_row, read_rows
from benchmarks.harness.table import table
from remat.capture.refused import logging_functions

SHORTEST, BATCH, VOCABULARY = 24, 2, 500
FIRST = 4
WAYS = {
    "aot_eager, each length by itself": "aot_eager",
    "remat, each length by itself": "static",
    "remat.backend": "backend",
    "remat.enable": "enable",
}
RESULTS = Path(__file__).parents[1] / "results"


def compiled(way: str, model: GPT2LMHeadModel, most_plans: int) -> Any:
    """The model trained one way."""
    if way == "enable":
        return remat.enable(model, budget="80%", planner="greedy", most_plans=most_plans)
    backend: Any = "aot_eager"
    if way != "aot_eager":
        backend = remat.backend("80%", planner="greedy", most_plans=most_plans)
    return torch.compile(model, backend=backend, dynamic=None if way == "backend" else False)


def measured(way: str, layers: int, count: int, most_plans: int) -> dict[str, Any]:
    """What each new length takes one way."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=layers, n_head=4, n_positions=2048)
    config.use_cache, config.loss_type = False, "ForCausalLM"
    model = GPT2LMHeadModel(config)
    run, process = compiled(way, model, most_plans), psutil.Process()

    def step(length: int) -> float:
        tokens = torch.randint(0, VOCABULARY, (BATCH, length))
        begin = time.process_time()
        run(input_ids=tokens, labels=tokens).loss.backward()
        took = time.process_time() - begin
        model.zero_grad()
        return took

    lengths = random.Random(0).sample(range(SHORTEST, SHORTEST + count), count)
    limits = {"recompile_limit": 10 * count, "accumulated_recompile_limit": 10 * count}
    took, there = [], 0
    with torch._dynamo.config.patch(ignore_logging_functions=set(logging_functions(model)), **limits):
        for at, length in enumerate(lengths):
            first = step(length)
            took.append(first - step(length))
            if at == FIRST - 1:
                gc.collect()
                there = process.memory_info().rss
    gc.collect()
    more = (process.memory_info().rss - there) / (1e6 * max(1, count - FIRST))
    return {"way": way, "layers": layers, "count": count, "most": most_plans, "took": took, "megabytes": more}


def report(rows: list[dict[str, Any]], command: str) -> str:
    """The table and what it says."""
    ran_on, names = machine("torch", "transformers"), {way: name for name, way in WAYS.items()}
    body = []
    for row in rows:
        took, later = row["took"], row["took"][FIRST:]
        first = (f"{each:.2f}" for each in took[:FIRST])
        rest = (f"{statistics.mean(later):.2f}", f"{max(later):.2f}", f"{sum(took):.0f}", f"{row['megabytes']:.1f}")
        body.append((names[row["way"]], row["layers"], row["count"], *first, *rest))
    head = ("", "layers", "lengths", "first (s)", "second", "third", "fourth", "then, mean (s)", "most (s)", "all (s)")
    text = (__doc__ or "").split("\n\n", 1)[1].strip()
    return f"""# New lengths, measured

`{command}`, {ran_on.date}; {ran_on}. No GPU was measured.

{text}

{table((*head, "MB a length"), body)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--most-plans", type=int, default=64)
    parser.add_argument("--ways", nargs="+", default=list(WAYS.values()), choices=WAYS.values())
    parser.add_argument("--raw", type=Path, default=RESULTS / "lengths.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "lengths.md")
    parser.add_argument("--one", choices=WAYS.values(), help="measure one way in this process, and print a line")
    given = parser.parse_args()
    sizes = ["--layers", str(given.layers), "--count", str(given.count), "--most-plans", str(given.most_plans)]
    if given.one:
        torch.set_num_threads(1)
        print(json.dumps(measured(given.one, given.layers, given.count, given.most_plans)))
        return
    rows = read_rows(given.raw)
    for way in given.ways:
        if any((r["way"], r["layers"], r["count"]) == (way, given.layers, given.count) for r in rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.training.lengths", *sizes, "--one", way]
            environment = {**os.environ, "REMAT_CACHE_DIR": folder}
            said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(said.splitlines()[-1]))
        print(way, f"{statistics.mean(rows[-1]['took'][FIRST:]):.2f} s a length", flush=True)
        add_row(given.raw, rows[-1])
    ways = [] if given.ways == list(WAYS.values()) else ["--ways", *given.ways]
    given.out.write_text(report(rows, " ".join(["python -m benchmarks.training.lengths", *sizes, *ways])))


if __name__ == "__main__":
    main()
