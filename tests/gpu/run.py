"""The acceptance test on a GPU, `make test-gpu`: each case in a process of its own, then a report and what it shows.

It needs a CUDA build of torch and this clone; about ten minutes. It ends with 0 only if every case ran and holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "client", "solver", "service")]

from gpu.case import STAND_IN  # noqa: E402
from remat.cli.doctor import FORMAT, expected, verdicts  # noqa: E402

LONGEST_S = 300
"""Of one case; ranks, which start processes of their own, have twice that."""

SURROUNDINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "REMAT_OFFLINE": "1"}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def run_case(name: str, cache: str) -> dict[str, Any]:
    """What a case found, or how its process ended."""
    around = {**os.environ, **SURROUNDINGS, "REMAT_CACHE_DIR": cache, **(EXPANDABLE if "expandable" in name else {})}
    limit = LONGEST_S * (2 if name.startswith("ranks") else 1)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.json"
        command = [sys.executable, str(ROOT / "tests" / "gpu" / "case.py"), name, str(into)]
        try:
            ended = subprocess.run(command, env=around, cwd=ROOT, timeout=limit, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"name": name, "error": f"no end after {limit} s"}
        if into.exists():
            found: dict[str, Any] = json.loads(into.read_text())
            return found
        return {"name": name, "error": f"its process ended with {ended.returncode}", "traceback": ended.stderr[-8000:]}


def main(arguments: Sequence[str]) -> int:
    """Run all cases, or those that are named, which makes a report that is not whole."""
    take = argparse.ArgumentParser(description=__doc__)
    take.add_argument("--report", type=Path, default=Path("remat-gpu-report.json"))
    take.add_argument("--stand-in", action="store_true", help="on the stand-in, which shows that this program works")
    take.add_argument("cases", nargs="*")
    given = take.parse_args(arguments)
    if given.stand_in:
        os.environ[STAND_IN] = "1"
    with tempfile.TemporaryDirectory() as cache:
        print("record", flush=True)
        recorded = run_case("record", cache)
        if "samples" not in recorded:
            print(
                f"{recorded.get('traceback', '')}\nno CUDA device can be used here: no case ran, and nothing is shown"
            )
            return 1
        cases = []
        for name in given.cases or expected(recorded["samples"]):
            print(name, end=" ", flush=True)
            began = time.monotonic()
            cases.append(run_case(name, cache))
            print(f"{time.monotonic() - began:.0f} s", flush=True)
    report = {"format": FORMAT, "record": recorded["samples"], "cases": cases}
    given.report.write_text(json.dumps(report, indent=1))
    found = verdicts(report)
    for verdict in found:
        print(f"{'holds' if verdict.fine else 'FAILS'}  {verdict.case}: {verdict.found}")
    failed = sum(not verdict.fine for verdict in found)
    print(f"{len(found) - failed} hold, {failed} fail; {given.report} has the samples: send it with an issue")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
