"""Kinds of members that requests alone have: rows of named integers, and objects whose keys are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remat_ir import InvalidData
from remat_ir.document import Array, Integer, Kind, Text
from remat_ir.read import array, escape, kind

_WHOLE = Integer()


@dataclass(frozen=True)
class Row:
    """An array of one integer for each of `names`."""

    names: tuple[str, ...]

    def read(self, value: object, what: str, pointer: str) -> tuple[int, ...]:
        """As a tuple."""
        items = array(value, what, pointer)
        if len(items) != len(self.names):
            raise InvalidData(f"{what} must be [{', '.join(self.names)}]", pointer)
        named = zip(self.names, items, strict=True)
        return tuple(_WHOLE.read(item, f"{what}: {name}", f"{pointer}/{i}") for i, (name, item) in enumerate(named))

    def schema(self) -> dict[str, Any]:
        """The JSON Schema."""
        return Array(Integer(), len(self.names), len(self.names)).schema()


@dataclass(frozen=True)
class Dictionary:
    """An object of at most `longest` members, whose keys are data too.

    Attributes:
        called: what a key, and what an entry is called.
    """

    key: Text
    of: Kind
    longest: int
    called: tuple[str, str]

    def read(self, value: object, what: str, pointer: str) -> dict[str, Any]:
        """As a dictionary."""
        if not isinstance(value, Mapping):
            raise InvalidData(f"{what} must be an object, not {kind(value)}", pointer)
        if len(value) > self.longest:
            raise InvalidData(f"{what} has {len(value)} entries, more than the {self.longest} allowed", pointer)
        return {
            self.key.read(key, self.called[0], pointer): self.of.read(
                entry, f"{self.called[1]} {key[:60]!r}", f"{pointer}/{escape(key)[:100]}"
            )
            for key, entry in value.items()
        }

    def schema(self) -> dict[str, Any]:
        """The JSON Schema."""
        key = {name: limit for name, limit in self.key.schema().items() if name != "type"}
        return {
            "type": "object",
            "additionalProperties": self.of.schema(),
            "maxProperties": self.longest,
            "propertyNames": key,
        }
