"""`remat doctor` and `warm`: whether all is in place, what the report of a GPU shows, kernels compiled now."""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
from rich.text import Text

from remat_ir import InvalidData, readable

from ..errors import InvalidResponse, NotAllowed, RematError
from ..planning import service
from ..planning.budget import bytes_of
from ..planning.http import Http
from ..planning.sources import solver_door
from ..settings import Settings, settings
from . import options
from .app import BAD_INPUT, app, read_text, text_console

FORMAT = "remat-gpu-report/1"

STAND_IN = "stand-in"
"""The name of the device that is none: its reports show that the program works, and nothing about a GPU."""

ONE_DEVICE = (
    "bits fp32",
    "bits tf32",
    "bits bf16",
    "bits flash attention",
    "bits efficient attention",
    "bits math attention",
    "bits convolutions",
    "bits lstm dropout",
    "spread flash attention",
    "spread efficient attention",
    "spread convolutions with benchmark",
    "inductor layer norm",
    "memory attention",
    "memory convolutions",
    "memory expandable segments",
    "limit attention",
    "time attention",
    "time convolutions",
    "transfers",
)
TWO_DEVICES = ("bits second device", "ranks ddp", "ranks fsdp2")

MEMORY_TOLERANCE = 0.005
SMALLEST_BYTES = 64 * 1024
ROUNDING = 1e-5
"""Relative distance of gradients that is rounding, where plain does not differ from plain at all."""
TIME_TOLERANCE = 0.15
STEPS, ROUNDS = 20, 8


class Verdict(NamedTuple):
    """What a case shows, in a sentence."""

    case: str
    fine: bool
    found: str


def expected(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The cases that a report has to hold: those for two devices where there are two."""
    return ONE_DEVICE + (TWO_DEVICES if record["devices"] > 1 else ())


def verdicts(report: Any) -> list[Verdict]:
    """The verdict of each case that there should be, and of each that is there.

    Raises:
        InvalidData: not a report.
    """
    try:
        if report["format"] != FORMAT:
            raise InvalidData(f"a report has the format {FORMAT}, not {report['format']!r}")
        record, cases = report["record"], {case["name"]: case for case in report["cases"]}
        if len(cases) != len(report["cases"]):
            raise InvalidData("a report has each case once")
        names = dict.fromkeys((*expected(record), *cases))
        return [_recorded(record), *(_verdict(name, cases.get(name)) for name in names)]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidData(f"this is no report of make test-gpu: {type(error).__name__} {error}") from None


def _recorded(record: Mapping[str, Any]) -> Verdict:
    said = f"{record['device']} × {record['devices']}, torch {record['torch']}, commit {str(record['commit'])[:12]}"
    if record["device"] == STAND_IN:
        return Verdict("record", False, f"{said}: no GPU, so that this shows nothing about one")
    return Verdict("record", True, said)


def _verdict(name: str, case: Mapping[str, Any] | None) -> Verdict:
    if case is None:
        return Verdict(name, False, "did not run")
    if case.get("error"):
        return Verdict(name, False, str(case["error"])[:300])
    try:
        fine, said = _RULES[name.partition(" ")[0]](case["samples"])
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, statistics.StatisticsError) as error:
        return Verdict(name, False, f"the samples are not whole: {type(error).__name__} {error}")
    return Verdict(name, fine, said)


def _bits(samples: Mapping[str, Any]) -> tuple[bool, str]:
    first, second = samples["plain"]
    plan, broken = samples["plan"], samples.get("broken")
    if not first or first != second:
        return False, f"void: plain differs from plain in {_differing(first, second)}"
    if plan != first:
        return False, f"the plan differs from plain in {_differing(first, plan)}"
    if broken is not None and broken == first:
        return False, "a broken replay went unnoticed: the case shows nothing"
    control = "" if broken is None else f"; a broken replay differs in {_differing(first, broken)}"
    return True, f"{len(first)} tensors and generators equal bit for bit{control}"


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return f"{len(names)} of {len({*one, *other})} ({', '.join(names[:2])}{', …' if len(names) > 2 else ''})"


def _spread(samples: Mapping[str, Any]) -> tuple[bool, str]:
    plain, plan = max(samples["plain"]), max(samples["plan"])
    whole = len(samples["plain"]) == len(samples["plan"]) >= 5
    seeds = len(samples["plan"])
    said = f"gradients: plain from plain {plain:.1e}, the plan from plain {plan:.1e}, at most over {seeds} seeds"
    return whole and plan <= max(2 * plain, ROUNDING), said


def _memory(samples: Mapping[str, Any]) -> tuple[bool, str]:
    predicted, requested = int(samples["predicted"]), int(samples["requested"])
    said = (
        f"{readable(requested)} asked for, {readable(predicted)} predicted "
        f"({100 * (predicted / requested - 1):+.2f} %); "
        f"{readable(samples['allocated'])} allocated, {readable(samples['reserved'])} reserved in all, "
        f"{readable(samples['device'])} by the device"
    )
    return abs(predicted - requested) <= max(MEMORY_TOLERANCE * requested, SMALLEST_BYTES), said


def _limit(samples: Mapping[str, Any]) -> tuple[bool, str]:
    plan, plain = int(samples["plan"]), int(samples["plain"])
    said = f"on {readable(samples['budget'])}, of which {readable(samples['outside'])} lie outside of the allocator, "
    said += f"the plan ran {plan} steps with {readable(samples['reserved'])} reserved"
    said += f" ({readable(samples['predicted_reserved'])} predicted)"
    if plan < STEPS:
        return False, f"{said}, then it was out of memory"
    if plain >= STEPS:
        return False, f"{said}, and so did plain training: the limit shows nothing"
    return True, f"{said}, and plain training was out of memory"


def _time(samples: Mapping[str, Any]) -> tuple[bool, str]:
    plain, plan = samples["seconds"]["plain"], samples["seconds"]["plan"]
    ratios = sorted(b / a for a, b in zip(plain, plan, strict=True))
    if len(ratios) < ROUNDS:
        raise ValueError(f"{len(ratios)} rounds")
    predicted = samples["predicted_ns"]["plan"] / samples["predicted_ns"]["plain"]
    middle = statistics.median(ratios)
    low, high = ratios[1], ratios[-2]
    said = (
        f"the plan takes {middle:.3f} of plain's time ({low:.3f} to {high:.3f}), {predicted:.3f} predicted; plain "
        f"{1e3 * statistics.median(plain):.1f} ms"
    )
    return low - TIME_TOLERANCE <= predicted <= high + TIME_TOLERANCE, said


def _transfers(samples: Mapping[str, Any]) -> tuple[bool, str]:
    sent, back, broken = samples["sent"], samples["back"], samples["broken"]
    if not sent or back != sent:
        return False, "what came back is not what was sent"
    if broken == sent:
        return False, "copies that nobody waited for went unnoticed: the case shows nothing"
    return True, f"{len(sent)} storages came back as they were; without waits they did not"


def _ranks(samples: Mapping[str, Any]) -> tuple[bool, str]:
    plain, plan = samples["plain"], samples["plan"]
    same = len(plain) > 1 and plain == plan
    return same, f"parameters of {len(plain)} ranks with a plan {'equal' if same else 'differ from'} those without"


_RULES: dict[str, Callable[[Mapping[str, Any]], tuple[bool, str]]] = {
    "bits": _bits,
    "inductor": _bits,
    "spread": _spread,
    "memory": _memory,
    "limit": _limit,
    "time": _time,
    "transfers": _transfers,
    "ranks": _ranks,
}


Check: TypeAlias = tuple[str, bool | None, str]
"""What a user may lack, whether it is fine (None: neither), and what was found."""


@app.command()
def doctor(
    base_url: options.Url = None,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="SIZE", help="Whether a GPU has this much free memory.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--gpu-report", metavar="FILE", help="Evaluate a report of make test-gpu.")
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Check the installation: versions, settings, service, solver, torch, GPUs, and the folder of the memo."""
    if report is not None:
        checks: list[Check] = [*verdicts(_json(report))]
    else:
        checks = _checks(settings(base_url=base_url), None if budget is None else bytes_of(budget))
    width = max(len(what) for what, _, _ in checks)
    if as_json:
        print(json.dumps([{"what": what, "fine": fine, "found": found} for what, fine, found in checks]))
    else:
        console, marks = text_console(), {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}
        for what, fine, found in checks:
            console.print(Text.assemble(marks[fine], f" {what:<{width}} {found}"))
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
        try:
            (free, total), about = there.free_and_total(), there.properties
        except RuntimeError as error:  # another process has it for itself, or its memory is full
            found.append((str(there.device), False, f"cannot be used: {str(error).partition(chr(10))[0]}"))
            continue
        driver = flags.driver_says(f"GPU-{getattr(about, 'uuid', '')}", "driver_version") or "unknown"
        said = f"{about.name}, driver {driver}, {readable(free)} free of {readable(total)}"
        fits = budget is None or free >= budget
        if budget is not None:
            said += f", {'enough for' if fits else 'too little for'} a budget of {readable(budget)}"
        found.append((str(there.device), fits, said))
    if not found:
        return [("gpu", None if budget is None else False, "torch finds none here")]
    return found + [("setting", None, sentence) for sentence in flags.risks()]


@app.command()
def warm() -> None:
    """Compile the local solver's kernels now, once for an installation: some 20 seconds.

    Otherwise the first plan waits for it.
    """
    package = solver_door("local").__module__.partition(".")[0]
    done = subprocess.run([sys.executable, "-P", "-m", f"{package}.warm"], check=False)
    raise typer.Exit(done.returncode)
