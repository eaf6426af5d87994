"""`make recipes`: each recipe in a process of its own; one that has passed at this commit is not run again.

`python -m recipes NAME …` runs some of them. The table is `recipes/results.md`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import recipes

TABLE = Path(__file__).parent / "results.md"
HEAD = """# Recipes

Each row is a script of this folder, trained by `aot_eager` and by plans from one seed on a CPU. Losses, weights,
buffers, optimizer states and generators have to be equal, every measured peak inside its budget. `make recipes` writes
this table; what its libraries lack is said.

| recipe | result | steps | plans | take-overs | memory saved at most | seconds | date | commit |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
SOAK = "\n## Soak\n\n"


def names() -> list[str]:
    """The recipes, as "script" or "script:variant"."""
    found = []
    for module in sorted(m.name for m in pkgutil.iter_modules(recipes.__path__)):
        if module not in ("training", "soak", "__main__"):
            source = (Path(__file__).parent / f"{module}.py").read_text()
            variants = re.search(r"^VARIANTS = \((.*?)\)$", source, re.MULTILINE | re.DOTALL)
            found += [f"{module}:{v}" for v in re.findall(r'"([^"]+)"', variants[1])] if variants else [module]
    return found


def run(name: str) -> str:
    """The columns of a row that follow the name: trained in this process.

    Raises:
        ImportError: what it needs is not installed.
    """
    from .training import compared

    script, _, variant = name.partition(":")
    module = importlib.import_module(f"recipes.{script}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (variant,) if variant else ()
        found = compared(lambda training: module.train(training, *arguments), folder)
    result = "equal" if not found.faults else "; ".join(found.faults[:3])
    seconds = round(time.monotonic() - began)
    saved = "unknown" if found.saved is None else f"{found.saved:.0%}"
    return f"{result} | {found.steps} | {found.plans} | {found.take_overs} | {saved} | {seconds}"


def commit() -> str:
    command = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=TABLE.parent).stdout.strip()


def rows() -> dict[str, str]:
    """The table's rows by recipe."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    found = (re.match(r"\| ([\w:]+) \| ", line) for line in lines)
    return {match[1]: match.string for match in found if match and match[1] != "recipe"}


def write(known: Mapping[str, str], soak: str | None = None) -> None:
    """Write the table with these rows, and what the soak has come to: as it was, if it is not given."""
    _, mark, before = TABLE.read_text().partition(SOAK) if TABLE.exists() else ("", "", "")
    table = HEAD + "".join(f"{known[each]}\n" for each in names() if each in known)
    TABLE.write_text(table + mark + before if soak is None else table + SOAK + soak)


def lacking(said: str) -> bool:
    """Whether an error says that a library is not there or lacks a name; what this repository lacks is a failure."""
    ours = re.search(r"'(?:recipes|remat\w*)[.']", said)
    return said.startswith(("ImportError", "ModuleNotFoundError")) and ours is None


def main() -> int:
    """0 where all that could be run are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="; ".join(names()))
    parser.add_argument("--here", action="store_true", help="one, in this process, without the table")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(names()):
        parser.error(f"no recipe is called {' or '.join(sorted(unknown))}; there are: {', '.join(names())}")
    if asked.here:
        print(run(asked.names[0]))
        return 0
    failed = 0
    for name in asked.names or names():
        before = rows().get(name, "")
        if not asked.names and "| equal |" in before and before.endswith(f"| {commit()} |"):
            continue
        command = (sys.executable, "-m", "recipes", "--here", name)
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=TABLE.parents[1])
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode:
            print("\n".join(done.stderr.splitlines()[-40:]), flush=True)
            errors = re.findall(r"^[\w.]+: .+", done.stderr, re.MULTILINE)  # a hint may follow the last one
            said = (errors or ["no message"])[-1]
            skipped = lacking(said)
            last = f"{'not run' if skipped else 'failed'}: {said[:160].replace('|', '/')} | | | | | "
            failed += not skipped
        else:
            failed += not last.startswith("equal")
        write({**rows(), name: f"| {name} | {last} | {datetime.date.today()} | {commit()} |"})
        print(f"{name}: {last}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
