"""`python -m remat_solver.warm`: compile every kernel, or say whether that is done."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from . import _numba
from .kernels import compile_apart, load_all


def main(arguments: list[str] | None = None) -> int:
    """Compile what is not in numba's cache, and say where that is."""
    parser = argparse.ArgumentParser(prog="python -m remat_solver.warm", description="Compile the solver's kernels.")
    parser.add_argument("--check", action="store_true", help="compile nothing; exit code 1 where a kernel is missing")
    check = parser.parse_args(arguments).check
    kernels = _numba.KERNELS
    missing = [made for made in kernels if not _numba.cached(made)]
    folders = sorted({str(Path(path).parent) for made in kernels if (path := made.stats.cache_path)})
    where = f"in {', '.join(folders)}" if folders else "without a cache: no folder can be written"
    if missing and not check:
        print(f"compiling {len(missing)} of {len(kernels)} kernels {where}", file=sys.stderr, flush=True)
        began = time.monotonic()
        compile_apart()
        load_all()
        print(f"compiled in {time.monotonic() - began:.1f} s", file=sys.stderr)
        missing = [made for made in kernels if not _numba.cached(made)]
    print(f"{len(kernels) - len(missing)} of {len(kernels)} kernels are compiled {where}")
    return bool(missing)


if __name__ == "__main__":
    raise SystemExit(main())
