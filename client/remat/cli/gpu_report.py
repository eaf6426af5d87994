"""What the report of `make test-gpu` shows, judged from its raw samples alone: `remat doctor --gpu-report FILE`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from remat_ir import InvalidData, readable

FORMAT = "remat-gpu-report/1"

STAND_IN = "stand-in"
"""The name of the device that is none: its reports show that the program works, and nothing about a GPU."""

BITS = (
    "bits fp32",
    "bits tf32",
    "bits bf16",
    "bits flash attention",
    "bits efficient attention",
    "bits math attention",
    "bits convolutions",
    "bits lstm dropout",
)
ONE_DEVICE = (
    *BITS,
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
    said = (
        f"on {readable(samples['budget'])}, of which {readable(samples['outside'])} lie outside of the allocator, the "
    )
    said += f"plan ran {plan} steps with {readable(samples['reserved'])} reserved"
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
