"""What is being done and for how long, while a caller waits: a line at a terminal, lines in a log without one."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from remat_ir import Progress

log = logging.getLogger("remat")

EVERY_S = 30.0
"""So often a log says what is still being done."""


class Lines(logging.Handler):
    """What remat has to say as lines on standard error, unless somebody else shows it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; that it cannot be printed, as on a full disk, ends nobody's training."""
        try:
            print(f"remat: {record.getMessage()}", file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 – as each handler of the standard library
            self.handleError(record)


def show_log() -> None:
    """Show the log from INFO on where standard error is no terminal and the caller has not configured logging.

    Of a job's ranks the first one speaks, by `RANK` of torchrun.
    """
    if sys.stderr.isatty() or log.hasHandlers() or log.level != logging.NOTSET or os.environ.get("RANK", "0") != "0":
        return
    lines = Lines()
    lines.addFilter(lambda _: not logging.getLogger().handlers)  # configured since then
    log.addHandler(lines)
    log.setLevel(logging.INFO)


class _Doing:
    """What is being done now, innermost last; while there is anything, the log has a line each half a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: list[tuple[str, float]] = []
        self._over = threading.Event()

    def begin(self, what: str) -> tuple[str, float]:
        """From now on this is being done."""
        entry = what, time.monotonic()
        with self._lock:
            self._now.append(entry)
            if len(self._now) == 1:
                self._over = threading.Event()
                threading.Thread(target=self._tell, args=(self._over,), name="remat-lines", daemon=True).start()
        return entry

    def end(self, entry: tuple[str, float]) -> None:
        """It is done."""
        with self._lock:
            self._now.remove(entry)
            if not self._now:
                self._over.set()

    def _tell(self, over: threading.Event) -> None:
        while not over.wait(EVERY_S):
            with self._lock:
                found = self._now[-1:]
            for what, since in found:
                log.info("still %s, for %.0f s so far", what, time.monotonic() - since)


_DOING = _Doing()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Say in the log what is done inside, now and each half a minute."""
    show_log()
    log.info("%s", what)
    entry = _DOING.begin(what)
    try:
        yield
    finally:
        _DOING.end(entry)


class Phases:
    """A line on standard error with the phase and its seconds, where that is a terminal; the log has a line for each.

    Args:
        on_progress: what the caller wants called at each improvement; with it nothing is shown.
    """

    def __init__(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        self._shown = on_progress is None and sys.stderr.isatty()
        columns = (SpinnerColumn(), TextColumn("remat: {task.description}"), TimeElapsedColumn())
        self._display = Display(*columns, console=Console(stderr=True), transient=True, disable=not self._shown)
        self._task = self._display.add_task("", total=None)
        self._entry: tuple[str, float] | None = None
        self.on_progress = self._report if self._shown else on_progress
        show_log()

    def __enter__(self) -> Phases:
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.stop()
        self._over()

    def begin(self, phase: str) -> None:
        """Say what is done from now on."""
        self._over()
        self._entry = _DOING.begin(phase)
        log.debug("%s", phase)
        self._display.reset(self._task, description=phase)

    def end(self, line: str) -> None:
        """Say what came of it: in the log, or on the terminal where the log does not show it."""
        self._over()
        log.info("%s", line)
        if self._shown and not log.isEnabledFor(logging.INFO):
            self._display.console.print(f"remat: {line}", highlight=False, markup=False)

    def _over(self) -> None:
        """Log how long the phase took that was begun last."""
        if self._entry is not None:
            phase, since = self._entry
            _DOING.end(self._entry)
            log.info("%s took %.1f s", phase, time.monotonic() - since)
            self._entry = None

    def _report(self, progress: Progress) -> None:
        self._display.update(self._task, description=f"planning: {progress}")
