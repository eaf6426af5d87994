"""The load measurement: what it has started ends with it, and its rows are kept as they come."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sqlalchemy.engine import make_url

from service.serving import eventually

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ended in its second run: server, workers and PostgreSQL are gone, and the first run's row is in the file."""
    out = tmp_path / "load.md"
    options = ["--jobs", "200", "--workers", "1", "2", "--budgets", "1.0", "--out", str(out)]
    load = subprocess.Popen([sys.executable, "-m", "benchmarks.load", "scaling", *options], cwd=ROOT)
    try:
        eventually(lambda: out.exists() and "| 1 | 1 | 20 |" in out.read_text(), 120)
        services = eventually(lambda: found if len(found := _services(load.pid)) == 3 else None, 60)
        started = [*services, *_postgres_of(services[0])]
        assert len(started) == 4
        load.terminate()
        assert load.wait(60) == 128 + signal.SIGTERM
    finally:
        load.kill()
        load.wait()
    eventually(lambda: not [process for process in started if process.is_running()])
    assert "The run was cut short." in out.read_text()


def _services(pid: int) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # what starts PostgreSQL comes and goes
            if "remat_service.cli" in each.cmdline():
                found.append(each)
    return found


def _postgres_of(service: psutil.Process) -> list[psutil.Process]:
    """The server that a service uses: no child of the measurement's, it has made itself a daemon."""
    port = str(make_url(service.environ()["REMAT_DATABASE_URL"]).port)
    every = psutil.process_iter(["cmdline"])
    return [each for each in every if {"-p", port, "-D"} <= set(each.info["cmdline"] or ())]
