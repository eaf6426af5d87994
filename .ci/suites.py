"""Run suites of checks side by side and print one line for each: suite, items, seconds.

`python .ci/suites.py change` is what a change must pass, `python .ci/suites.py nightly` what takes longer. As many run
at once as the cores allow. Nightly, a suite that has passed at this commit is not run again, so the command can be
stopped and given again. `benchmarks/results/nightly.md` has each nightly suite's last run with its date and its commit,
and says how many commits came since; the rows of suites that do not run now stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
PAGE = ROOT / "benchmarks" / "results" / "nightly.md"
LONGEST_S = 55 * 60
"""A suite that takes longer is stopped and has failed: it is to be cut in two."""

SLOW = "slow and not gpu and not standin"
WALKS = (
    "README.md",
    *(f"docs/{page}.md" for page in ("quickstart-training", "quickstart-platform", "quickstart-research", "migration")),
)
NOT_THERE = re.compile(r"^torch \S+: not run, since .*", re.MULTILINE)
"""What `tests/releases/lane.py` says in place of running."""
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

    @property
    def result(self) -> str:
        """One of "passed", "failed", and "not run": of a release of torch that the machine's index does not have."""
        if self.status:
            return "failed"
        return "not run" if NOT_THERE.search(self.output) else "passed"


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
    """The slow tests of a folder, in parts of as many files: a mark may come from a helper in another file."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
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


def run(suites: list[Suite], cores: int) -> Generator[tuple[Suite, Ended]]:
    """Run suites, in their order where cores are free, and give each when it ends; none goes on after this."""
    waiting, running = list(suites), list[tuple[Suite, subprocess.Popen[bytes], float, Path]]()
    with tempfile.TemporaryDirectory() as folder:
        try:
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
        finally:
            interrupt([process for _, process, *_ in running])


def interrupt(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End suites that run: each has a session of its own, which Ctrl-C in a terminal does not reach."""
    for number, patience_s in ((signal.SIGINT, 30.0), (signal.SIGKILL, None)):  # pytest ends what its tests started
        until = time.monotonic() + (patience_s or 0.0)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if patience_s is None else max(0.0, until - time.monotonic()))


def passed(output: str) -> int | None:
    """How many items pytest says have passed; None where the output is not pytest's."""
    found = re.findall(r"\b(\d+) passed\b", output)
    return int(found[-1]) if found else None


def line(suite: Suite, ended: Ended) -> str:
    """A suite's line."""
    items = "" if ended.items is None else f"{ended.items} items"
    return f"{suite.name:<22} {items:>12} {ended.seconds:>6} s  {ended.result.replace('failed', 'FAILED')}"


def git(*command: str) -> str | None:
    """What git prints; None where it fails."""
    found = subprocess.run(("git", *command), cwd=ROOT, check=False, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def commit() -> str:
    """The commit that is tested; marked where files other than the page differ from it."""
    changed = git("diff", "--quiet", "HEAD", "--", ".", f":!{PAGE.relative_to(ROOT)}") is None
    return f"{git('rev-parse', '--short=10', 'HEAD')}{' and changes' if changed else ''}"


def since(tested: str) -> str:
    """How many commits have changed more than the page since one that was tested."""
    first = tested.split()[0]
    if git("merge-base", "--is-ancestor", first, "HEAD") is None:
        return "of another history"
    return git("rev-list", "--count", f"{first}..HEAD", "--", ".", f":!{PAGE.relative_to(ROOT)}") or ""


@dataclass(frozen=True)
class Row:
    """A suite's last nightly run, as the page has it: its cells are texts."""

    items: str
    seconds: str
    result: str
    date: str
    commit: str
    machine: str


def rows(page: str) -> dict[str, Row]:
    """The runs that a page tells of, by the names of the suites."""
    found = {}
    for text in page.splitlines():
        name, *cells = (cell.strip() for cell in text.strip("|").split("|"))
        if text.startswith("|") and len(cells) == 7 and cells[2] in ("passed", "failed", "not run"):
            found[name] = Row(*cells[:6])
    return found


def known() -> dict[str, Row]:
    """The runs that the page tells of now."""
    return rows(PAGE.read_text()) if PAGE.exists() else {}


def page(runs: dict[str, Row]) -> str:
    """The page: a row for each nightly suite, whether it has ever run or not."""
    lines = [
        "# The nightly suites\n",
        "Written by `make nightly`, or by `python .ci/suites.py nightly --only 'seeds*'` for some suites. Each row is",
        f"the last run of a suite. The last column counts the commits that have come since, up to {commit()}.\n",
        "| suite | items | seconds | result | date | commit | machine | commits since |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for suite in NIGHTLY:
        row = runs.get(suite.name)
        cells = ("", "", "never run", "", "", "", "") if row is None else (*astuple(row), since(row.commit))
        lines.append(f"| {' | '.join((suite.name, *cells))} |")
    return "\n".join(lines) + "\n"


def record(suite: Suite, ended: Ended) -> None:
    """Write the page anew with how a nightly suite ended."""
    row = Row(
        "" if ended.items is None else str(ended.items),
        str(ended.seconds),
        ended.result,
        str(datetime.date.today()),
        commit(),
        f"{os.cpu_count()} cores, Python {platform.python_version()}",
    )
    PAGE.write_text(page(known() | {suite.name: row}))


def done(suite: Suite) -> bool:
    """Whether a suite has passed with these very files, but for the page."""
    row = known().get(suite.name)
    passed_here = row is not None and row.result == "passed" and since(row.commit) == "0"
    return passed_here and "changes" not in f"{row} {commit()}"


def chosen(suite: Suite, asked: str) -> bool:
    """Whether a suite's name begins with what is asked for, or matches it as a shell's pattern."""
    return suite.name.startswith(asked) or fnmatch.fnmatchcase(suite.name, asked)


def main() -> int:
    """The exit status: 1 where a suite fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("change", "nightly"))
    parser.add_argument("--only", default="", help="suites whose names begin with this, or match it: 'walk*'")
    parser.add_argument("--skip", help="no suites whose names begin with this, or match it")
    parser.add_argument("--list", action="store_true", help="print the suites' names")
    asked = parser.parse_args()
    nightly = asked.which == "nightly"
    suites = [suite for suite in (NIGHTLY if nightly else CHANGE) if chosen(suite, asked.only)]
    suites = [suite for suite in suites if not (asked.skip and chosen(suite, asked.skip))]
    if not suites:
        parser.error(f"no suite of {asked.which} is left by --only {asked.only!r} and --skip {asked.skip!r}")
    if asked.list:
        print("\n".join(suite.name for suite in suites))
        return 0
    status = 0
    wanted = [suite for suite in suites if not (nightly and done(suite))]
    for suite in suites:
        if suite not in wanted:
            print(f"{suite.name:<22} has passed at this commit before: not run again")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is ended, too
    with contextlib.closing(run(wanted, 1 if nightly else os.cpu_count() or 1)) as ends:
        for suite, ended in ends:
            if ended.status:
                status = 1
                print("\n".join(ended.output.splitlines()[-400:]))
            elif why := NOT_THERE.search(ended.output):
                print(why[0])
            print(line(suite, ended), flush=True)
            if nightly:
                record(suite, ended)
    return status


if __name__ == "__main__":
    sys.exit(main())
