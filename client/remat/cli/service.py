"""`remat attach`, `cancel` and `ls`: solves at the service."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from remat_ir import Answer, InvalidData, readable

from ..planning import service
from ..planning.sources import ServicePlanner
from ..settings import settings
from . import options
from .app import app, check_writable, text_console
from .show import STYLES, percent
from .solve import given_out

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of a solve, or the first characters of it.")]
MATCHES = 1000
"""How many solves that the service finds for an abbreviated id are looked at."""
SHORT, WHOLE = 8, 32
"""Characters of an id in a list, and of a whole one."""
NAME, WIDE = 14, 100
"""Characters of a name in a list, and of a terminal that has room for more columns next to names."""


@app.command()
def attach(
    solve_id: IdArgument,
    wait: Annotated[float, typer.Option("--wait", metavar="S", help="Seconds to wait for its end.")] = 3600.0,
    output: options.Output = None,
    base_url: options.Url = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Wait for a solve by its id and print its answer. Interrupting the wait does not end the solve."""
    planner = _planner(base_url)
    check_writable(output)
    solve_id = _whole_id(planner, solve_id)
    answer = _watched(planner, solve_id, time.monotonic() + wait, quiet)
    if not answer.status.ended:
        print(f"remat: solve {solve_id} is still {answer.status.value}", file=sys.stderr)
    return given_out(answer, output, as_json)


@app.command()
def cancel(
    solve_id: IdArgument, output: options.Output = None, base_url: options.Url = None, as_json: options.Json = False
) -> int:
    """End a solve and print its best plan so far. Others who wait for the same solve keep it running."""
    planner = _planner(base_url)
    check_writable(output)
    return given_out(service.cancel(planner.http, _whole_id(planner, solve_id)), output, as_json)


@app.command(name="ls")
def list_solves(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, newest first.")] = 20,
    base_url: options.Url = None,
    as_json: options.Json = False,
) -> int:
    """List the solves at the service, newest first."""
    rows = service.solves(_planner(base_url).http, limit + 1)
    rows, older = rows[:limit], rows[limit:]  # ids are in the order of time: the next one is the most alike
    if as_json:
        print(json.dumps(rows))
        return 0
    console, names = text_console(), [_printable(row.get("name")) for row in rows]
    wide = console.width >= WIDE
    last = ("seconds", "cache") if wide or not any(names) else ()
    name_width = 0 if not any(names) else NAME + (max(0, console.width - WIDE) if wide else 0)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("id", *(("name",) if name_width else ()), "status", "method", "overhead", "gap", "budget", *last):
        side: Any = "right" if name in ("overhead", "gap", "budget", "seconds") else "left"
        table.add_column(name, justify=side, no_wrap=True)
    ids = _short([str(row.get("id", "")) for row in rows + older])
    for short, called, row in zip(ids, names, rows, strict=False):
        seconds = _number(row.get("seconds"), lambda seconds: f"{seconds:.1f}")
        table.add_row(
            short,
            *((_cut(called, name_width),) if name_width else ()),
            str(row.get("status", "")),
            str(row.get("method", "")),
            _number(row.get("overhead"), percent),
            _number(row.get("gap"), percent),
            _number(row.get("budget_bytes"), lambda size: readable(int(size))),
            *((seconds, str(row.get("cache") or "")) if last else ()),
            style=STYLES.get(str(row.get("status"))) if row.get("status") == "failed" else None,
        )
    console.print(table)
    return 0


def _planner(base_url: str | None) -> ServicePlanner:
    here = settings(base_url=base_url)
    if here.service_url is None:
        why = "REMAT_OFFLINE is set" if here.offline and here.base_url else "set REMAT_BASE_URL or give --base-url"
        raise InvalidData(f"there is no service to ask: {why}")
    return ServicePlanner(here.service_url, api_key=here.api_key)


def _short(ids: list[str]) -> list[str]:
    """The ids as short as they can be told apart, but not shorter than eight characters."""
    length = SHORT
    while length < max(map(len, ids), default=0) and len({each[:length] for each in ids}) < len(set(ids)):
        length += 1
    return [each[:length] for each in ids]


def _whole_id(planner: ServicePlanner, given: str) -> str:
    """The id that an abbreviation means; what can be none is left to the service to refuse.

    Raises:
        InvalidData: several solves have ids that begin so, or none has.
    """
    if len(given) >= WHOLE or not re.fullmatch("[0-9a-f]+", given):
        return given
    found = [str(row.get("id")) for row in service.solves(planner.http, MATCHES, given)]
    matches = [each for each in found if each.startswith(given)]
    if len(matches) > 1:
        raise InvalidData(f"{len(matches)} solves have ids that begin with {given}: {', '.join(_short(matches[:4]))}")
    if not matches:
        raise InvalidData(f"no solve at {planner.http.base_url} has an id that begins with {given}")
    return matches[0]


def _watched(planner: ServicePlanner, solve_id: str, until: float, quiet: bool) -> Answer:
    """Poll until the end or the moment; progress as lines on standard error."""
    seen: tuple[Any, Any] | None = None
    while True:
        left = until - time.monotonic()
        answer = service.poll(planner.http, solve_id, wait_s=round(max(0.0, min(2.0, left)), 2), wait_until=until)
        if not quiet and (answer.cost_ns, answer.bound_ns) != seen:
            seen = (answer.cost_ns, answer.bound_ns)
            gap = "" if answer.gap is None else f", gap {percent(answer.gap)}"
            print(f"{answer.seconds:6.1f} s  {answer.status.value}{gap}", file=sys.stderr, flush=True)
        if answer.status.ended or left <= 0:
            return answer


def _printable(name: Any) -> str:
    """A name without what a terminal would obey."""
    return "".join(c for c in name if c.isprintable()) if isinstance(name, str) else ""


def _cut(name: str, width: int) -> Text:
    return Text(name if len(name) <= width else name[: width - 1] + "…")


def _number(value: Any, as_text: Any) -> str:
    return as_text(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
