"""What a kind of device has, by its data sheet, and what share of that kernels achieve.

The shares and the time of a launch are not measured: they are what well-known kernels are reported to reach on Ampere
and Hopper for the sizes of training, rounded. They stand in one place so that a table of your own can replace them.
No figure here was taken on a GPU by this project.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from remat_ir import InvalidData

from ..planning.budget import bytes_of

ACHIEVED: Mapping[str, float] = {
    "matmul": 0.70,  # of the peak of its dtype
    "convolution": 0.45,
    "attention": 0.40,
    "pointwise": 0.80,  # of the bandwidth, from here on
    "reduction": 0.70,
    "gather": 0.40,
    "other": 0.40,
    "collective": 1.0,  # priced by its own model: see `remat.profiling.collectives`
}
"""By kinds of kernels whose prices are right or wrong together: see `remat.target.price.class_of`."""

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")

LAUNCH_NS = 4_000

CONTEXT_BYTES = 600 * 2**20
"""The driver's context, the libraries' code and workspaces: declared, not measured."""


@dataclass(frozen=True)
class Target:
    """One kind of device.

    Attributes:
        name: as the driver names it.
        memory_bytes: what the driver reports as the total.
        bandwidth: bytes per second of its memory.
        peak: operations per second by dtype, dense; "tf32" counts where float32 products may use it.
        achieved: share of peak or bandwidth by class of kernels.
        launch_ns: the least that a kernel takes.
        context_bytes: what is not there for tensors.
        profiles: the name under which costs that were measured on this kind of device are shared; empty: none are.
        capability: what CUDA says of its generation, by which libraries choose kernels.
        counts_operations: costs are floating-point operations, not ns (Checkmate, Section 4.2): those of products,
            convolutions and attentions by torch's formulas, of every other kernel one for each number that it makes.
        source: where the figures are from.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak: Mapping[str, float]
    achieved: Mapping[str, float] = field(default_factory=lambda: dict(ACHIEVED))
    launch_ns: int = LAUNCH_NS
    context_bytes: int = CONTEXT_BYTES
    profiles: str = ""
    capability: tuple[int, int] = (9, 0)
    counts_operations: bool = False
    source: str = ""

    @property
    def usable_bytes(self) -> int:
        """What a job may fill with tensors."""
        return self.memory_bytes - self.context_bytes


def target_of(text: str | Target) -> Target:
    """A device by its short name, or from a table in a TOML or JSON file.

    The table has the fields of `Target`: `name`, `memory` ("80GiB"), `bandwidth` (bytes per second) and `peak`
    (operations per second by dtype); `achieved`, `launch_ns`, `context`, `profiles` and `capability` where the usual
    ones are wrong.

    Example:
        >>> target_of("h100").name, round(target_of("h100").memory_bytes / 2**30, 1)
        ('NVIDIA H100 80GB HBM3', 79.2)

    Raises:
        InvalidData: neither a name nor such a file; the message says what is wrong.
    """
    if isinstance(text, Target):
        return text
    if not isinstance(text, str):
        raise InvalidData(f"a device is one of {', '.join(TARGETS)}, or a table in a TOML or JSON file, not {text!r}")
    named = _named(text)
    if named is not None:
        return TARGETS[named]
    path = Path(text)
    if path.suffix not in (".toml", ".json"):
        raise InvalidData(
            f"{text!r} is no device: write one of {', '.join(TARGETS)}, or a table in a .toml or .json file"
        )
    try:
        content = path.read_text(encoding="utf-8")
        data = tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
    except OSError as error:
        raise InvalidData(f"the table {text} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidData(f"the table {text} is no {path.suffix[1:].upper()}: {error}") from None
    try:
        return _read(data)
    except InvalidData as error:
        raise InvalidData(f"the table {text}: {error}") from None


def _named(text: str) -> str | None:
    """The device that a name means, however it is spelled, or the only one that begins so: "RTX 4090", "gaudi"."""

    def bare(name: str) -> str:
        return "".join(c for c in name.lower() if c.isalnum())

    wanted = bare(text) if not text.lower().endswith((".toml", ".json")) else ""
    begin = [name for name in TARGETS if len(wanted) > 2 and bare(name).startswith(wanted)]
    exact = [name for name in TARGETS if bare(name) == wanted]
    found = exact or begin
    return found[0] if len(found) == 1 else None


def _read(data: Any) -> Target:
    if not isinstance(data, Mapping):
        raise InvalidData("it must have the fields name, memory, bandwidth and peak")
    known = {"memory", "context", *(f.name for f in fields(Target) if not f.name.endswith("_bytes"))}
    for word in data:
        if word not in known:
            raise InvalidData(f"{word} is none of the fields {', '.join(sorted(known))}")
    for word in ("name", "memory", "bandwidth", "peak"):
        if word not in data:
            raise InvalidData(f"{word} is missing")
    found = Target(
        name=_text(data, "name"),
        memory_bytes=bytes_of(data["memory"]),
        bandwidth=_number(data["bandwidth"], "bandwidth"),
        peak={dtype: _number(value, f"peak.{dtype}") for dtype, value in _table(data, "peak").items()},
        achieved={**ACHIEVED, **{name: _share(name, value) for name, value in _table(data, "achieved").items()}},
        launch_ns=int(_number(data.get("launch_ns", LAUNCH_NS), "launch_ns")),
        context_bytes=bytes_of(data.get("context", CONTEXT_BYTES)),
        profiles=_text(data, "profiles"),
        capability=_capability(data.get("capability", (9, 0))),
        counts_operations=data.get("counts_operations") is True,
        source=_text(data, "source"),
    )
    unknown = sorted(set(found.peak) - set(DTYPES))
    if unknown or not found.peak:
        raise InvalidData(
            f"peak has operations per second by {', '.join(DTYPES)}, not {', '.join(unknown) or 'nothing'}"
        )
    if found.usable_bytes <= 0:
        raise InvalidData("context leaves nothing of memory")
    return found


def _capability(value: Any) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(type(part) is int for part in value):
        raise InvalidData(f"capability must be two numbers such as [9, 0], not {value!r}")
    return value[0], value[1]


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str):
        raise InvalidData(f"{name} must be text, not {value!r}")
    return value


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, Mapping):
        raise InvalidData(f"{name} must be a table, not {value!r}")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise InvalidData(f"{name} must be a positive number, not {value!r}")
    return float(value)


def _share(name: str, value: object) -> float:
    if name not in ACHIEVED:
        raise InvalidData(f"achieved.{name} is none of the classes {', '.join(ACHIEVED)}")
    share = _number(value, f"achieved.{name}")
    if share > 1:
        raise InvalidData(f"achieved.{name} must be at most 1, not {value!r}")
    return share


TARGETS: Mapping[str, Target] = {
    name: _read(table)
    for name, table in tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")).items()
}
"""The devices that have a short name; `devices.toml` has their figures, each with its source."""
