"""A service of one's own for as long as a block runs: a process on a free port with a SQLite file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

READY = re.compile(r"ready on (http://\S+)")


class Served(NamedTuple):
    """A running service: its URL and its process."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def serving(store: Path, *, patience_s: float = 90.0) -> Iterator[Served]:
    """Start the service and end it, its children included, with the block.

    Raises:
        RuntimeError: it did not say that it is ready; its last lines are in the message.
    """
    command = [
        sys.executable,
        "-m",
        "remat_service.cli",
        "serve",
        "--port=0",
        "--database-url",
        f"sqlite:///{store}",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines: deque[str] = deque(maxlen=20)
    found: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            said = READY.search(line)
            if said is not None and not found:
                found.append(said[1])
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(patience_s)
        if not found:
            raise RuntimeError("the service did not start:\n" + "\n".join(lines))
        yield Served(found[0], process)
    finally:
        process.terminate()
        deadline = time.monotonic() + 15.0
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(5.0)
        if process.stdout is not None:
            process.stdout.close()
