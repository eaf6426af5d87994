"""`remat doctor`: whether everything is in place, and what the report of a GPU shows."""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from remat_ir import InvalidData, readable

from ..errors import InvalidResponse, NotAllowed, RematError
from ..planning import service
from ..planning.budget import bytes_of
from ..planning.http import Http
from ..planning.sources import solver_door
from ..settings import Settings, settings
from .app import BAD_INPUT, JsonOption, UrlOption, app
from .files import read_text
from .gpu_report import verdicts

Check: TypeAlias = tuple[str, bool | None, str]
"""What a user may lack, whether it is fine (None: neither), and what was found."""


@app.command()
def doctor(
    base_url: UrlOption = None,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="SIZE", help="Whether a GPU has this much free memory.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--gpu-report", metavar="FILE", help="Evaluate a report of make test-gpu.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check the installation: versions, settings, service, solver, torch, GPUs, and the folder of the memo."""
    if report is not None:
        checks: list[Check] = [(verdict.case, verdict.fine, verdict.found) for verdict in verdicts(_json(report))]
    else:
        checks = _checks(settings(base_url=base_url), None if budget is None else bytes_of(budget))
    width = max(len(what) for what, _, _ in checks)
    if as_json:
        print(json.dumps([{"what": what, "fine": fine, "found": found} for what, fine, found in checks]))
    else:
        console = Console()
        for what, fine, found in checks:
            mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]–[/]"}[fine]
            console.print(f"{mark} {what:<{width}} {found}", highlight=False)
    return BAD_INPUT if any(fine is False for _, fine, _ in checks) else 0


def _json(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise InvalidData(f"{path}: no JSON: {error}") from None


def _checks(here: Settings, budget: int | None) -> list[Check]:
    """For each thing that a user may lack."""
    return [
        ("remat", True, f"{_version('remat')} on Python {platform.python_version()}, {platform.machine()}"),
        _check_service(here),
        _check_solver(),
        ("torch", None if find_spec("torch") is None else True, _version("torch")),
        *_check_gpus(budget),
        ("pictures", None if find_spec("matplotlib") is None else True, _version("matplotlib", "matplotlib ")),
        _check_cache(here),
    ]


def _check_service(here: Settings) -> Check:
    if here.base_url is None:
        return "service", None, "REMAT_BASE_URL is not set: plans are made here"
    if here.offline:
        return "service", None, f"{here.base_url} is not asked: REMAT_OFFLINE is set"
    http = Http(here.base_url, api_key=here.api_key, retries=0)
    try:
        seconds = service.ready(http)
        with contextlib.suppress(InvalidResponse):  # whoever stands in for a service need not have a list
            service.solves(http, 1)
    except NotAllowed as error:
        what = "asks for a key" if here.api_key is None else "refuses the key"
        return "service", False, f"{here.base_url} {what}: set REMAT_API_KEY to one that it knows ({error})"
    except RematError as error:
        return "service", False, str(error)
    return "service", True, f"{here.base_url} is ready ({1000 * seconds:.0f} ms)"


def _check_solver() -> Check:
    try:
        door = solver_door("local")
    except InvalidData as error:
        return "solver", None, str(error)
    return "solver", True, f"found as {door.__module__.partition('.')[0]}, with {_version('highspy', 'HiGHS ')}"


def _check_cache(here: Settings) -> Check:
    try:
        here.cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=here.cache_dir):
            pass
    except OSError as error:
        return "memo", None, f"{here.cache_dir} cannot be written ({error.strerror}): nothing is remembered"
    entries = sum(1 for _ in (here.cache_dir / "answers").glob("*/*.json"))
    return "memo", True, f"{here.cache_dir}: {entries} answers remembered"


def _version(package: str, before: str = "") -> str:
    try:
        return before + version(package)
    except PackageNotFoundError:
        return f"{package} is not installed"


def _check_gpus(budget: int | None) -> list[Check]:
    """Each GPU with its driver and its free memory, against a budget; settings under which plans may not hold."""
    if find_spec("torch") is None:
        return [("gpu", None, "torch is not installed")]
    device, flags = import_module("remat.device"), import_module("remat.device_flags")  # these import torch
    found: list[Check] = []
    for there in device.accelerators():
        free, total = there.free_and_total()
        uuid = f"GPU-{getattr(there.properties, 'uuid', '')}"
        driver = flags.driver_says(uuid, "driver_version") or "unknown"
        said = f"{there.properties.name}, driver {driver}, {readable(free)} free of {readable(total)}"
        fits = True if budget is None else free >= budget
        said += (
            "" if budget is None else f", {'enough for' if fits else 'too little for'} a budget of {readable(budget)}"
        )
        found.append((str(there.device), fits, said))
    if not found:
        return [("gpu", None if budget is None else False, "torch finds none here")]
    return found + [("setting", None, sentence) for sentence in flags.risks()]
