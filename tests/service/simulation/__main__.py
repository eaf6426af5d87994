"""Replays seeds: `python -m service.simulation 7`, or `python -m service.simulation 0:10000` for a range."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from .machine import simulate


def main() -> int:
    """Run the seeds; the first that fails ends the run with its traceback and how to replay it, and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m service.simulation", description=__doc__)
    parser.add_argument("seeds", help="a seed, or FIRST:LAST+1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other seed after so long")
    given = parser.parse_args()
    first, _, end = given.seeds.partition(":")
    until = time.monotonic() + given.seconds
    done = 0
    for number in range(int(first), int(end or int(first) + 1)):
        if time.monotonic() > until:
            break
        try:
            simulate(number)
        except Exception:
            traceback.print_exc()
            print(f"{done} seeds hold, seed {number} fails: make simulate SEED={number}", file=sys.stderr)
            return 1
        done += 1
        if done % 100 == 0:
            print(f"{done} seeds hold, up to {number}", flush=True)
    print(f"{done} seeds hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
