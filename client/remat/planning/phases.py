"""What is being done and for how long, while a caller waits at a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from remat_ir import Progress

log = logging.getLogger("remat")


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
        self._phase, self._since = "", 0.0
        self.on_progress = self._report if self._shown else on_progress

    def __enter__(self) -> Phases:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()
        self._over()

    def begin(self, phase: str) -> None:
        """Say what is done from now on."""
        self._over()
        self._phase, self._since = phase, time.monotonic()
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
        if self._phase:
            log.info("%s took %.1f s", self._phase, time.monotonic() - self._since)
            self._phase = ""

    def _report(self, progress: Progress) -> None:
        self._display.update(self._task, description=f"planning: {progress}")
