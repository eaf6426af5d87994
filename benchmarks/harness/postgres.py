"""A PostgreSQL server of one's own in a folder, which may be stopped and started at will."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path


class NoPostgres(RuntimeError):
    """There is no PostgreSQL to start on this machine."""


class PrivatePostgres:
    """A server in a temporary folder outside any caller's, because it may have to run as another user.

    Raises:
        NoPostgres: its programs are not installed.
    """

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        initdb = str(found[-1]) if found else shutil.which("initdb")
        if initdb is None:
            raise NoPostgres("no PostgreSQL answers and there is none to start: set REMAT_TEST_DATABASE_URL")
        self.bin = Path(initdb).parent
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []  # it refuses to run as root
        self._folder: Path
        self.port = _free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> PrivatePostgres:
        self._folder = Path(tempfile.mkdtemp(prefix="remat-postgres-"))
        try:
            if self._as:
                shutil.chown(self._folder, "postgres")
            self._run("initdb", "-D", str(self._folder / "data"), "-U", "postgres", "-A", "trust", "--no-sync")
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if (self._folder / "data" / "postmaster.pid").exists():  # else it is stopped already
                self.stop()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -k '' -c fsync=off"
        folder = self._folder
        self._run("pg_ctl", "-D", str(folder / "data"), "-l", str(folder / "log"), "-w", "-o", options, "start")

    def stop(self) -> None:
        """Stop it, breaking every connection."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self.bin / program), *arguments]
        # to a file, not a pipe: the server inherits it and never closes it
        with (self._folder / "out").open("ab") as out:
            done = subprocess.run(command, stdout=out, stderr=out, check=False, cwd="/")
        if done.returncode != 0:
            said = (self._folder / "out").read_text(errors="replace")[-500:]
            raise RuntimeError(f"{program} failed: {said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
