"""How a solve talks to its engine's process: a JSON header and raw arrays, framed, over pipes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program import Program

_SIZES = struct.Struct("<QQ")
_KINDS = frozenset({"float64", "int32", "int64", "bool"})
_ARRAYS = tuple(field.name for field in fields(Program) if field.name != "offset")


class Message(NamedTuple):
    """A kind, JSON members, and named arrays."""

    kind: str
    members: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def send(
    stream: IO[bytes],
    kind: str,
    members: Mapping[str, Any] | None = None,
    arrays: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Write one message and flush it."""
    packed = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    shapes = [[name, array.dtype.name, len(array)] for name, array in packed.items()]
    head = json.dumps({"kind": kind, "members": dict(members or {}), "arrays": shapes}).encode()
    stream.write(_SIZES.pack(len(head), sum(_padded(array.nbytes) for array in packed.values())))
    stream.write(head)
    for array in packed.values():
        if array.nbytes:
            stream.write(array.view(np.uint8).data)
            stream.write(bytes(_padded(array.nbytes) - array.nbytes))
    stream.flush()


def receive(stream: IO[bytes]) -> Message | None:
    """Read one message; None at the end of the stream, also in the middle of a message."""
    sizes = _exactly(stream, _SIZES.size)
    if sizes is None:
        return None
    head_bytes, body_bytes = _SIZES.unpack(sizes)
    head, body = _exactly(stream, head_bytes), _exactly(stream, body_bytes)
    if head is None or body is None:
        return None
    data = json.loads(bytes(head))
    arrays: dict[str, NDArray[Any]] = {}
    at = 0
    for name, kind, count in data["arrays"]:
        if kind not in _KINDS:
            raise ValueError(f"array {name!r} has the unexpected type {kind!r}")
        # the bytearray is ours alone, so the array may be written to
        arrays[name] = np.frombuffer(body, dtype=kind, count=count, offset=at)
        at += _padded(arrays[name].nbytes)
    return Message(data["kind"], data["members"], arrays)


def program_arrays(program: Program) -> dict[str, NDArray[Any]]:
    """A program's arrays by name; its offset travels among the members."""
    return {name: getattr(program, name) for name in _ARRAYS}


def program_of(message: Message) -> Program:
    """The program that a message carries."""
    return Program(**{name: message.arrays[name] for name in _ARRAYS}, offset=float(message.members["offset"]))


def _padded(count: int) -> int:
    """Arrays start at multiples of 8 bytes, so that the reader's views are aligned."""
    return (count + 7) & ~7


def _exactly(stream: IO[bytes], count: int) -> bytearray | None:
    data = bytearray(count)
    return data if stream.readinto(data) == count else None  # type: ignore[attr-defined]
