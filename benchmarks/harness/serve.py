"""Processes of the service, for as long as a block runs: servers on free ports, and workers."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_STARTS = 10
"""How often a process is started that ends before it is ready."""


class Processes:
    """What a measurement has started, ended with the block that it is used in.

    Without a URL the database is a SQLite file in the folder. It is sealed by a key of this object's own, unless the
    settings have another one.
    """

    def __init__(self, folder: Path, url: str | None = None, **settings: Any) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "REMAT_DATABASE_URL": url or f"sqlite:///{folder}/load.sqlite",
            "REMAT_SEAL_KEY": secrets.token_hex(32),
            "REMAT_LOG_LEVEL": "WARNING",
            "REMAT_NOTICE_S": "0",
            **{"REMAT_" + name.upper(): str(value) for name, value in settings.items()},
        }
        self.log = (folder / "log").open("a")
        self.running: list[subprocess.Popen[str]] = []
        self.port = 0

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.terminate()
        for process in list(self.running):
            try:
                self.end(process)
            except subprocess.TimeoutExpired:
                self.end(process, signal.SIGKILL)
        self.log.close()

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A `remat-service` process, once it says that it is ready.

        While its database is away it ends with a sentence; then it is started again, as whatever supervises it would.
        """
        for _ in range(_STARTS):
            process = subprocess.Popen(
                [sys.executable, "-m", "remat_service.cli", *arguments],
                env=self.environment, stdout=subprocess.PIPE, stderr=self.log, text=True,
            )  # fmt: skip
            self.running.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready" in line:
                break
            self.end(process)
            time.sleep(1.0)
        else:
            said = (self.folder / "log").read_text(errors="replace")[-2000:]
            raise SystemExit(f"{arguments} did not start; see {self.folder}/log:\n{said}")
        found = re.search(r"http://[^:]+:(\d+)", line)
        if found:
            self.port = int(found.group(1))
        return process

    def serve(self) -> subprocess.Popen[str]:
        """The server, on the same port again after the first time."""
        return self.start("serve", "--port", str(self.port))

    def end(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
        """Signal one and wait."""
        if process.poll() is None:
            process.send_signal(number)
        process.wait(60)
        self.running.remove(process)
