"""Run suites of checks side by side and print one line for each: suite, items, seconds.

`python .ci/suites.py change` is what a change must pass, `python .ci/suites.py nightly` what takes longer. As many run
at once as the cores allow. Nightly, a suite that has passed at this commit is not run again, so the command can be
stopped and given again; its last run is in `benchmarks/results/nightly.md`, with the date and the commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
DONE = ROOT / ".nightly"
PAGE = ROOT / "benchmarks" / "results" / "nightly.md"
LONGEST_S = 55 * 60
"""A suite that takes longer is stopped and has failed: it is to be cut in two."""

SLOW = "slow and not gpu and not standin"
WALKS = (
    "README.md",
    *(f"docs/{page}.md" for page in ("quickstart-training", "quickstart-platform", "quickstart-research", "migration")),
)
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


@dataclass(frozen=True)
class Suite:
    """A command, and how many cores it keeps busy; none where it waits for the network and the disk."""

    name: str
    command: tuple[str, ...]
    cores: int = 1


@dataclass(frozen=True)
class Ended:
    """How a suite ended: its exit status, the items that passed, its seconds, and its output."""

    status: int
    items: int | None
    seconds: int
    output: str


def marked_tests(name: str, marked: str, *paths: str) -> Suite:
    """The tests of some files, or of all, that are marked in one way.

    One process: a slow test has the machine to itself, and may start processes of its own.
    """
    return Suite(name, (PYTHON, "-m", "pytest", "-q", "-m", marked, *paths))


def release(version: str) -> Suite:
    """What has to hold on every release of torch, on one; a machine whose index lacks it says so."""
    return Suite(f"torch {version}", (PYTHON, "tests/releases/lane.py", version, "--if-there"))


def walk(page: str) -> Suite:
    """A page, from an empty environment, as its reader goes through it."""
    return Suite(f"walk {Path(page).stem}", (PYTHON, "tests/walks/walk.py", page))


def made(target: str, cores: int = 1) -> Suite:
    """A target of the Makefile."""
    return Suite(target, ("make", target), cores)


def pieces(folder: str, parts: int) -> Iterator[Suite]:
    """The slow tests of a folder, in parts of about as many files."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        if "mark.slow" in path.read_text()
    ]
    for part in range(parts):
        yield marked_tests(f"slow {folder} {part + 1}/{parts}", SLOW, *files[part::parts])


def seeds(count: int, parts: int) -> Iterator[Suite]:
    """The seeds of the simulated service, in parts."""
    for first in range(0, count, count // parts):
        which = f"{first}:{first + count // parts}"
        yield Suite(f"seeds {which}", ("env", "PYTHONPATH=tests", PYTHON, "-m", "service.simulation", which))


CHANGE = (
    made("wheel", 0),
    made("test-quick", 2),
    made("test-thorough", 2),
    made("test-standin", 2),
    made("lint"),
    made("lint-tests"),
    made("docs"),
    *map(release, (RELEASES[0], RELEASES[-1])),
)
NIGHTLY = (
    *pieces("client", 4),
    *pieces("service", 2),
    *pieces("solver", 1),
    *pieces("benchmarks", 2),
    *pieces("repository", 1),
    *seeds(10_000, 10),
    made("test-properties"),
    made("test-bounds", 2),
    *map(release, RELEASES),
    *map(walk, WALKS),
)


def run(suites: list[Suite], cores: int) -> Iterator[tuple[Suite, Ended]]:
    """Run suites, in their order where cores are free, and give each when it ends."""
    waiting, running = list(suites), list[tuple[Suite, subprocess.Popen[bytes], float, Path]]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            for suite in list(waiting):
                busy = sum(each.cores for each, *_ in running)
                if busy and busy + suite.cores > cores:
                    continue
                waiting.remove(suite)
                log = Path(folder) / f"{len(waiting)}.log"
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        suite.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                running.append((suite, process, time.monotonic(), log))
            time.sleep(0.2)
            for each in list(running):
                suite, process, begun, log = each
                seconds = time.monotonic() - begun
                if seconds > LONGEST_S and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.poll() is not None:
                    running.remove(each)
                    text = log.read_text(errors="replace")
                    yield suite, Ended(process.returncode, passed(text), round(seconds), text)


def passed(output: str) -> int | None:
    """How many items pytest says have passed; None where the output is not pytest's."""
    found = re.findall(r"\b(\d+) passed\b", output)
    return int(found[-1]) if found else None


def line(suite: Suite, ended: Ended) -> str:
    """A suite's line."""
    items = "" if ended.items is None else f"{ended.items} items"
    return f"{suite.name:<22} {items:>12} {ended.seconds:>6} s  {'passed' if ended.status == 0 else 'FAILED'}"


def commit() -> str:
    """The commit that is tested; marked where files other than the page differ from it."""
    asked = ("git", "rev-parse", "--short", "HEAD")
    found = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    compare = ("git", "diff", "--quiet", "HEAD", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    return found if subprocess.run(compare, cwd=ROOT, check=False).returncode == 0 else f"{found} and changes"


def record(suite: Suite, ended: Ended) -> None:
    """Note how a nightly suite ended, and write the page anew."""
    DONE.mkdir(exist_ok=True)
    noted = {
        "suite": suite.name,
        "items": ended.items,
        "seconds": ended.seconds,
        "result": "passed" if ended.status == 0 else "failed",
        "date": str(datetime.date.today()),
        "commit": commit(),
    }
    (DONE / (suite.name.replace("/", " of ") + ".json")).write_text(json.dumps(noted))
    lines = [
        "# The nightly suites\n",
        f"Written by `make nightly`, on {os.cpu_count()} cores with Python {platform.python_version()}.\n",
        "| suite | items | seconds | result | date | commit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in filter(None, map(noted_of, NIGHTLY)):
        cells = (row["suite"], row["items"] or "", row["seconds"], row["result"], row["date"], row["commit"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    PAGE.write_text("\n".join(lines) + "\n")


def noted_of(suite: Suite) -> dict[str, str | int | None] | None:
    """What is noted of a suite's last nightly run."""
    file = DONE / (suite.name.replace("/", " of ") + ".json")
    return json.loads(file.read_text()) if file.exists() else None


def done(suite: Suite) -> bool:
    """Whether a suite has passed at this very commit."""
    row = noted_of(suite)
    return row is not None and row["result"] == "passed" and row["commit"] == commit() and "changes" not in commit()


def main() -> int:
    """The exit status: 1 where a suite fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("change", "nightly"))
    parser.add_argument("--only", help="suites whose names begin with this")
    parser.add_argument("--skip", help="no suites whose names begin with this")
    parser.add_argument("--list", action="store_true", help="print the suites' names")
    asked = parser.parse_args()
    nightly = asked.which == "nightly"
    suites = [suite for suite in (NIGHTLY if nightly else CHANGE) if suite.name.startswith(asked.only or "")]
    suites = [suite for suite in suites if not (asked.skip and suite.name.startswith(asked.skip))]
    if asked.list:
        print("\n".join(suite.name for suite in suites))
        return 0
    status = 0
    wanted = [suite for suite in suites if not (nightly and done(suite))]
    for suite, ended in run(wanted, 1 if nightly else os.cpu_count() or 1):
        if ended.status:
            status = 1
            print("\n".join(ended.output.splitlines()[-400:]))
        print(line(suite, ended), flush=True)
        if nightly:
            record(suite, ended)
    return status


if __name__ == "__main__":
    sys.exit(main())
