"""The nightly page tells of each suite's last run, and a run of some of them leaves the others' rows as they were."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def suites() -> ModuleType:
    """The command as a module."""
    spec = importlib.util.spec_from_file_location("suites", ROOT / ".ci" / "suites.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["suites"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_read_as_it_is_written(suites: ModuleType) -> None:
    """Each suite has a row, whether it has run or not, and a row says how far behind its commit is."""
    first, second, *_ = suites.NIGHTLY
    older = suites.git("rev-list", "--max-parents=0", "HEAD").split()[0][:10]
    runs = {
        first.name: suites.Row("12", "7", "passed", "2026-11-20", older, "2 cores, Python 3.11.7"),
        second.name: suites.Row("", "9", "failed", "2026-11-21", "0123456789 and changes", "4 cores, Python 3.13.1"),
    }
    written = suites.page(runs)
    assert suites.rows(written) == runs
    assert written.count("never run") == len(suites.NIGHTLY) - 2
    assert written.count("of another history") == 1
    assert suites.since(older).isdigit()


def test_suites_are_chosen_by_a_beginning_or_a_pattern(suites: ModuleType) -> None:
    for asked in ("walk*", "walk "):
        assert [suite.name for suite in suites.NIGHTLY if suites.chosen(suite, asked)] == [
            f"walk {Path(page).stem}" for page in suites.WALKS
        ]


def test_every_slow_test_is_in_a_nightly_suite(suites: ModuleType) -> None:
    """Also where `tiers.first` or the looks of the page give the mark, which the file itself does not name."""
    named = {word for suite in suites.NIGHTLY for word in suite.command if word.startswith("tests/")}
    files = {path: path.read_text() for path in sorted((ROOT / "tests").glob("*/test_*.py"))}
    elsewhere = ("ir", "walks", "releases", "standin")  # the last two are run whole, by suites of their own
    left = [str(path.relative_to(ROOT)) for path in files if path.parent.name not in elsewhere]
    assert [name for name in left if name not in named] == []
    assert [path.name for path in files if path.parent.name in ("ir", "walks") and "mark.slow" in files[path]] == []
    assert [path.name for path in files if path.parent.name in ("ir", "walks") and "tiers" in files[path]] == []


@pytest.mark.thorough
@pytest.mark.parametrize("there", [True, False], ids=["an index of other releases", "no index"])
def test_a_release_that_is_not_run_has_not_passed(suites: ModuleType, tmp_path: Path, there: bool) -> None:
    """Where the index lacks it, that is said and is no failure; where no index answers, it is one."""
    if there:
        (tmp_path / "torch-1.0-py3-none-any.whl").touch()
    pip = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    lane = [sys.executable, str(ROOT / "tests" / "releases" / "lane.py"), "2.999.0", "--if-there"]
    done = subprocess.run(
        [*lane, "--environment", str(tmp_path / "made")], env=pip, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    ended = suites.Ended(done.returncode, suites.passed(done.stdout), 1, done.stdout)
    assert (ended.status == 0, ended.result) == ((True, "not run") if there else (False, "failed")), done.stdout
    assert suites.line(suites.NIGHTLY[0], ended).endswith("not run" if there else "FAILED")


def test_a_name_that_no_suite_has_is_refused() -> None:
    """Nothing to run is not a pass."""
    command = [sys.executable, str(ROOT / ".ci" / "suites.py"), "change", "--only", "test-qiuck"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no suite of change is left by --only 'test-qiuck'" in done.stderr


STOPPED = """
import importlib.util, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
spec = importlib.util.spec_from_file_location("suites", sys.argv[1])
suites = sys.modules["suites"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suites)
sleeper = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(120)"
suites.CHANGE = (suites.Suite("long", (sys.executable, "-c", sleeper, sys.argv[2])),)
sys.argv[1:] = ["change"]
sys.exit(suites.main())
"""
"""The command with one suite, which notes its process and does nothing for two minutes."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_runs_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """By Ctrl-C in a terminal, whose signal does not reach a suite, or by whoever ends the command."""
    noted = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(ROOT / ".ci" / "suites.py"), str(noted)], stderr=subprocess.DEVNULL
    ) as command:
        while not (noted.exists() and noted.read_text().endswith("\n")):
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(number)
        assert command.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


@pytest.mark.parametrize(
    ("browser", "said", "required"),
    [
        (None, ["Chromium could not be installed", "no Chromium: the page is not tested"], "no"),
        ("chromium-browser", [], "1"),
    ],
)
def test_a_browser_that_cannot_be_installed_stops_nothing(
    tmp_path: Path, browser: str | None, said: list[str], required: str
) -> None:
    """As root on Ubuntu, whose packages have no Chromium, or where no mirror is reached."""
    commands, clone = tmp_path / "bin", tmp_path / "clone"
    made = {
        commands / "make": "exit 0",
        commands / "id": "echo 0",
        commands / "apt-get": '[ "$1" = update ]',
        clone / ".venv" / "bin" / "python": 'echo "required: ${REMAT_REQUIRE_BROWSER:-no}"',
    }
    if browser is not None:
        made[commands / browser] = "exit 0"
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    for name in ("bash", "dirname"):
        (commands / name).symlink_to(shutil.which(name))
    (clone / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", clone / ".ci")
    done = subprocess.run(
        [str(clone / ".ci" / "run")], env={"PATH": str(commands)}, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*said, f"required: {required}"]


@pytest.mark.thorough
def test_a_nightly_build_that_is_there_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest one is asked for again: here of an index that has none."""
    spec = importlib.util.spec_from_file_location("lane", ROOT / "tests" / "releases" / "lane.py")
    lane = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lane)
    monkeypatch.setattr(lane, "NIGHTLY", ("--pre", "--no-index"))
    (tmp_path / ".installed").touch()
    assert lane.made("2.15.0", tmp_path) == tmp_path / "bin" / "python"
    with pytest.raises(SystemExit, match="No matching distribution found"):
        lane.made("nightly", tmp_path)
