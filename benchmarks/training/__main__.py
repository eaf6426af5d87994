"""What training by remat's plans costs, compared with what a job would use in its place, on real models.

For each model, in a process of its own: overhead over `aot_eager`, predicted against measured time and peak, and step
time against measured peak for plain training, `torch.utils.checkpoint` per block, selective checkpointing,
`activation_memory_budget` at five settings, and remat at the peaks of these. Results are kept round by round: a run
that was cut short goes on with the models that are not complete, and the tables hold what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.training.draw import RESULTS, read, write

NAMES = ("gpt2", "bert", "llama", "t5", "vit", "resnet50", "convnext", "unet")

KEEP_PAGES = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_MAX_": "0", "MALLOC_TOP_PAD_": str(2**26)}
"""glibc gives freed pages back and faults them in again within one step, by chance more or fewer; so it keeps them."""


def measure(name: str, folder: Path, given: argparse.Namespace) -> None:
    """Measure one model in a child, whose libraries' chatter goes to a file."""
    file = folder / f"{name}.json"
    if file.exists() and not given.again and json.loads(file.read_text()).get("complete"):
        print(f"{name}: measured before", flush=True)
        return
    print(f"{name}:", flush=True)
    words = ["tiny" if given.quick else "full", "0" if given.plans_only else str(given.rounds), str(given.time_limit)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.training.measure", name, str(file), str(folder / "cache"), *words],
            env=os.environ | KEEP_PAGES | threads,
            stderr=log,
            check=False,
        )
    if child.returncode:
        print(f"  ended with code {child.returncode}; see {folder / name}.log", flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=" ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="tiny models, three rounds: to see that it works")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way (default 15)")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve (default 10)")
    parser.add_argument("--out", type=Path, help="folder for client.csv, client.png, client.md (benchmarks/results)")
    parser.add_argument("--work", type=Path, default=Path("client-bench"), help="folder for rounds, plans and profiles")
    parser.add_argument("--plans-only", action="store_true", help="profile and plan, to time another day")
    parser.add_argument("--again", action="store_true", help="measure models that are complete once more")
    parser.add_argument("--draw", action="store_true", help="only write the tables of what is there")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.time_limit = min(given.rounds, 3), min(given.time_limit, 3.0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child is ended, too
    folder = (given.work / ("quick" if given.quick else "full")).resolve()
    out = given.out or (folder if given.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    for name in () if given.draw else given.models:
        measure(name, folder, given)
        found = read(folder, NAMES)
        if found:
            write(found, out)
    found = read(folder, NAMES)
    if found:
        write(found, out)
        print(f"tables of {len(found)} models in {out}", flush=True)
    return 0 if found or given.plans_only else 1


if __name__ == "__main__":
    sys.exit(main())
