"""Reports one after the other, all or those that are named: `python -m benchmarks.upstream [REPORT ...]`."""

from __future__ import annotations

import sys
from importlib import import_module

REPORTS = ("190758", "190717", "197838", "197871", "193193", "149258")


def main() -> int:
    """The number of reports that have changed, or whose tagged plan fails."""
    changed = 0
    for report in sys.argv[1:] or REPORTS:
        module = import_module(f"benchmarks.upstream.issue_{report}")
        print((module.__doc__ or "").splitlines()[0], flush=True)
        changed += bool(module.main())
        print(flush=True)
    return changed


if __name__ == "__main__":
    raise SystemExit(main())
