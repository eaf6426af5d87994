"""The command line in a test's own process: what a command prints on both streams, and its exit code."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remat.cli import main
from remat.cli.app import BAD_INPUT


@dataclass
class Ran:
    """How a run ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)

    def refused(self, says: str) -> None:
        """Bad input: one line that says so, and nothing else."""
        assert (self.code, self.out, self.err.count("\n")) == (BAD_INPUT, "", 1), self
        assert says in self.err


def written(path: Path, data: object) -> Path:
    """A file of JSON."""
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def remat(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Any]:
    """The entry point itself: torch and the solver are imported once for all, and what engines write is seen too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("REMAT_BASE_URL", "REMAT_OFFLINE", "REMAT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    log = logging.getLogger("remat")
    before = list(log.handlers), log.level

    def run(*words: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["remat", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    yield run
    log.handlers, log.level = before


command = remat
"""The same for tests that import the package `remat`, too."""
