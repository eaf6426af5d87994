"""What a kind of device has, by its data sheet, and what share of that kernels achieve.

The shares and the time of a launch are not measured: they are what well-known kernels are reported to reach on Ampere
and Hopper for the sizes of training, rounded. They stand in one place so that a table of your own can replace them.
No figure of this module was taken on a GPU by this project.
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

CLASSES = ("matmul", "convolution", "attention", "pointwise", "reduction", "gather", "other", "collective")
"""Kinds of kernels whose prices are right or wrong together: see `remat.target.price.class_of`."""

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
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak: Mapping[str, float]
    achieved: Mapping[str, float] = field(default_factory=lambda: dict(ACHIEVED))
    launch_ns: int = LAUNCH_NS
    context_bytes: int = CONTEXT_BYTES
    profiles: str = ""

    @property
    def usable_bytes(self) -> int:
        """What a job may fill with tensors."""
        return self.memory_bytes - self.context_bytes


_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "tf32": 495e12, "float32": 67e12, "float64": 34e12, "float8": 1979e12}

TARGETS: Mapping[str, Target] = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB",
        81152 * 2**20,
        2.039e12,
        {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 9.7e12},
    ),
    "h100": Target("NVIDIA H100 80GB HBM3", 81079 * 2**20, 3.35e12, _HOPPER),
    "h200": Target("NVIDIA H200", 143155 * 2**20, 4.8e12, _HOPPER),
    "l40s": Target(
        "NVIDIA L40S",
        45488 * 2**20,
        0.864e12,
        {
            "bfloat16": 362e12,
            "float16": 362e12,
            "tf32": 183e12,
            "float32": 91.6e12,
            "float64": 1.4e12,
            "float8": 733e12,
        },
    ),
}
"""Dense peaks and bandwidths from NVIDIA's data sheets of the SXM modules and of the L40S with ECC on."""


def target_of(text: str | Target) -> Target:
    """A device by its short name, or from a table in a TOML or JSON file.

    The table has the fields of `Target`: `name`, `memory` ("80GiB"), `bandwidth` (bytes per second) and `peak`
    (operations per second by dtype); `achieved`, `launch_ns`, `context` and `profiles` where the usual ones are wrong.

    Example:
        >>> target_of("h100").name, round(target_of("h100").memory_bytes / 2**30, 1)
        ('NVIDIA H100 80GB HBM3', 79.2)

    Raises:
        InvalidData: neither a name nor such a file; the message says what is wrong.
    """
    if isinstance(text, Target):
        return text
    if not isinstance(text, str):
        raise InvalidData(f"a device is one of {', '.join(TARGETS)} or a table in a TOML or JSON file, not {text!r}")
    if text.lower() in TARGETS:
        return TARGETS[text.lower()]
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


def _read(data: Any) -> Target:
    if not isinstance(data, Mapping):
        raise InvalidData("it must have the fields name, memory, bandwidth and peak")
    known = {"memory": "memory_bytes", "context": "context_bytes"}
    known |= {f.name: f.name for f in fields(Target) if not f.name.endswith("_bytes")}
    for word in data:
        if word not in known:
            raise InvalidData(f"{word} is none of the fields {', '.join(sorted(known))}")
    for word in ("name", "memory", "bandwidth", "peak"):
        if word not in data:
            raise InvalidData(f"{word} is missing")
    found = Target(
        _text(data, "name"),
        bytes_of(data["memory"]),
        _number(data["bandwidth"], "bandwidth"),
        {dtype: _number(value, f"peak.{dtype}") for dtype, value in _table(data, "peak").items()},
        {**ACHIEVED, **{name: _share(name, value) for name, value in _table(data, "achieved").items()}},
        int(_number(data.get("launch_ns", LAUNCH_NS), "launch_ns")),
        bytes_of(data.get("context", CONTEXT_BYTES)),
        _text(data, "profiles"),
    )
    unknown = sorted(set(found.peak) - set(DTYPES))
    if unknown or not found.peak:
        raise InvalidData(
            f"peak has operations per second by {', '.join(DTYPES)}, not {', '.join(unknown) or 'nothing'}"
        )
    if found.usable_bytes <= 0:
        raise InvalidData("context leaves nothing of memory")
    return found


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
        raise InvalidData(f"achieved.{name} is none of the classes {', '.join(CLASSES)}")
    share = _number(value, f"achieved.{name}")
    if share > 1:
        raise InvalidData(f"achieved.{name} must be at most 1, not {value!r}")
    return share
