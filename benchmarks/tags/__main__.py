"""`python -m benchmarks.tags models|inductor|graphs`: the tables of plans that torch carries out by tags.

Each goes on where it was stopped: what is in its file already is not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.tags import graphs, inductor, models

TABLES = {"models": models, "inductor": inductor, "graphs": graphs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is missing of a table, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tags", description=__doc__)
    tables = parser.add_subparsers(dest="table", required=True)
    for name, module in TABLES.items():
        module.options(tables.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    given = parser.parse_args(arguments)
    print(TABLES[given.table].made(given))


if __name__ == "__main__":
    main()
