"""Answers, solves and memory over time, for people: tables and a progress line with rich."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from remat_ir import Answer, Progress, Status, Subject, duration, gap_of, overhead_of, readable

from ..planning.summary import rests_on_claim

STYLES = {
    "optimal": "bold green",
    "feasible": "green",
    "infeasible": "bold red",
    "nothing_found": "yellow",
    "cancelled": "yellow",
    "failed": "bold red",
}

EACH_LINE_S = 1.0
"""Seconds between the lines of a progress that goes to a file."""


def answer_table(answer: Answer) -> Table:
    """How a solve ended, one row for each thing that is known."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    status = Text(answer.ending, style=STYLES.get(answer.status.value, ""))
    table.add_row("status", status)
    for name, text in answer_rows(answer):
        table.add_row(name, text)
    if answer.message:
        table.add_row("", answer.message)
    return table


def answer_rows(answer: Answer) -> list[tuple[str, str]]:
    """The known members of an answer as text."""
    rows = [("method", answer.method)]
    if answer.cost_ns is not None:
        rows.append(("cost", duration(answer.cost_ns)))
    if answer.overhead is not None:
        rows.append(("overhead", percent(answer.overhead)))
    if answer.chain_overhead is not None and answer.overhead is not None:
        text = f"persistent chain optimum {percent(answer.chain_overhead)}, this plan {percent(answer.overhead)}"
        rows.append(("baseline", text))
    if answer.bound_ns is not None:
        within = f" within {', '.join(answer.restricted_to)}" if answer.restricted_to else ""
        rows.append(("bound", duration(answer.bound_ns) + within))
        rows.append(("", _who_proves(answer)))
    if answer.gap is not None:
        rows.append(("gap", percent(answer.gap)))
    if answer.peak_bytes is not None:
        rows.append(("peak", readable(answer.peak_bytes)))
    rows.append(("budget", readable(answer.budget_bytes)))
    if answer.plan is None and answer.least_budget_bytes is not None:
        rows.append(("is enough", readable(answer.least_budget_bytes, up=True)))
    if answer.plan is None and answer.least_budget_bound_bytes is not None:
        least = answer.least_budget_bound_bytes
        claimed = answer.status is Status.INFEASIBLE and answer.claimed_by
        sure = f"claimed by {answer.claimed_by}" if claimed else "certified"
        rows.append(("needed at least", f"{readable(least)}, {sure}"))
    rows.append(("took", f"{answer.seconds:.2f} s" + (f", until {answer.limit}" if answer.limit else "")))
    if answer.id is not None:
        rows.append(("id", answer.id))
    if answer.cache is not None:
        rows.append(("cache", answer.cache))
    return rows


def _who_proves(answer: Answer) -> str:
    """Whether a bound is certified, and who claims a greater one."""
    if rests_on_claim(answer):
        return f"claimed by {answer.claimed_by}"
    if answer.claimed_by is None or answer.claimed_bound_ns is None:
        return "certified"
    return f"certified; {answer.claimed_by} claims {duration(answer.claimed_bound_ns)}"


def percent(share: float) -> str:
    """A share as a percentage with four significant digits."""
    return f"{100 * share:.4g} %"


def counted(number: int, what: str) -> str:
    """A number of things, in the singular where it is one."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def progress_text(progress: Progress, total_cost_ns: int) -> str:
    """One improvement as one line: incumbent, bound and gap."""
    if progress.cost_ns is None:
        return f"{progress.seconds:6.1f} s  no plan yet"
    text = f"{progress.seconds:6.1f} s  incumbent {percent(overhead_of(progress.cost_ns, total_cost_ns))} over"
    if progress.bound_ns is not None:
        text += f"  bound {percent(overhead_of(progress.bound_ns, total_cost_ns))}"
        text += f"  gap {percent(gap_of(progress.cost_ns, progress.bound_ns))}"
    return f"{text}  {progress.source}"


@contextmanager
def progress_line(
    subject: Subject, *, quiet: bool = False, what: str = "solving"
) -> Iterator[Callable[[Progress], None]]:
    """Show improvements on standard error while the block runs: one live line on a terminal, else a line at a time.

    What it yields may be called from any thread.
    """
    total = subject.total_cost_ns
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield _plain_lines(total)
        return
    console = Console(stderr=True)
    latest = Text(what)
    spinner = Spinner("dots", latest)
    with Live(Group(spinner), console=console, refresh_per_second=8, transient=True):

        def report(progress: Progress) -> None:
            spinner.update(text=Text(progress_text(progress, total)))

        yield report


def _plain_lines(total_cost_ns: int) -> Callable[[Progress], None]:
    lock, last = threading.Lock(), [-EACH_LINE_S]

    def report(progress: Progress) -> None:
        with lock:
            if time.monotonic() - last[0] < EACH_LINE_S:
                return
            last[0] = time.monotonic()
        print(progress_text(progress, total_cost_ns), file=sys.stderr, flush=True)

    return report
