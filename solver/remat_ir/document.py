"""Documents of the wire, each declared once: what reads them, and the JSON Schema that describes them.

Each kind of a member says what is accepted (`read`) and how it is described (`schema`). What needs more than one
member, such as an index that must name an op, is checked by the object that is made of the document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Protocol, Self

from .errors import InvalidData
from .read import LARGEST_INTEGER, array, column, integer, integer_rows, integers, kind, members, parsed

Schema = dict[str, Any]


class Kind(Protocol):
    """What a member of a document may be."""

    def read(self, value: object, what: str, pointer: str) -> Any:
        """The value as Python holds it.

        Raises:
            InvalidData: it is of another kind, or out of range; the message begins with `what`.
        """

    def schema(self) -> Schema:
        """The JSON Schema."""


@dataclass(frozen=True)
class Integer:
    """An integer from `least` to `most`; booleans and floats are refused, also 1.0."""

    least: int = 0
    most: int = LARGEST_INTEGER

    def read(self, value: object, what: str, pointer: str) -> int:
        """As it is."""
        return integer(value, what, pointer, self.least, self.most)

    def schema(self) -> Schema:
        """The JSON Schema."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


class AnyInteger(Integer):
    """An integer of an answer: its reader leaves the range to who wrote it."""

    def read(self, value: object, what: str, pointer: str) -> int:
        """As it is."""
        return value if type(value) is int else integer(value, what, pointer)

    def schema(self) -> Schema:
        """The JSON Schema."""
        return {"type": "integer"}


@dataclass(frozen=True)
class Number:
    """A finite number: at least `least`, or above `above`; below `below`."""

    least: float | None = None
    above: float | None = None
    below: float | None = None

    def read(self, value: object, what: str, pointer: str) -> float:
        """As a float."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidData(f"{what} must be a number, not {kind(value)}", pointer)
        try:
            found = float(value)
        except OverflowError:
            raise InvalidData(f"{what} is too large", pointer) from None
        if not math.isfinite(found):
            raise InvalidData(f"{what} must be finite", pointer)
        if (
            (self.least is not None and found < self.least)
            or (self.above is not None and found <= self.above)
            or (self.below is not None and found >= self.below)
        ):
            raise InvalidData(f"{what} must be {self._range()}, not {found}", pointer)
        return found

    def _range(self) -> str:
        if self.above is not None:
            return "positive" if self.above == 0 else f"above {self.above:g}"
        least = "" if self.least is None else f"at least {self.least:g}"
        below = "" if self.below is None else f"below {self.below:g}"
        return " and ".join(part for part in (least, below) if part)

    def schema(self) -> Schema:
        """The JSON Schema."""
        limits = {"minimum": self.least, "exclusiveMinimum": self.above, "exclusiveMaximum": self.below}
        return {"type": "number"} | {key: limit for key, limit in limits.items() if limit is not None}


@dataclass(frozen=True)
class Flag:
    """A boolean."""

    def read(self, value: object, what: str, pointer: str) -> bool:
        """As it is."""
        if not isinstance(value, bool):
            raise InvalidData(f"{what} must be a boolean, not {kind(value)}", pointer)
        return value

    def schema(self) -> Schema:
        """The JSON Schema."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text:
    """A string; one with a `longest` is stored, and holds nothing that a database refuses.

    Attributes:
        words: the strings that are written; a reader accepts others, which a later version may write.
        called: what the string is, for the message to who sends something else.
    """

    longest: int | None = None
    words: tuple[str, ...] = ()
    called: str = "a string"

    def read(self, value: object, what: str, pointer: str) -> str:
        """As it is."""
        if not isinstance(value, str):
            raise InvalidData(f"{what} must be {self.called}, not {kind(value)}", pointer)
        if self.longest is not None:
            if not 0 < len(value) <= self.longest:
                raise InvalidData(f"{what} must have 1 to {self.longest} characters", pointer)
            if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
                raise InvalidData(f"{what} holds a character that can't be stored", pointer)
        return value

    def schema(self) -> Schema:
        """The JSON Schema."""
        if self.words:
            return {"type": "string", "enum": list(self.words)}
        return {"type": "string"} | ({} if self.longest is None else {"minLength": 1, "maxLength": self.longest})


@dataclass(frozen=True)
class Array:
    """An array of entries of one kind.

    Attributes:
        shortest, longest: entries, as the schema says.
        cap: entries at which a reader stops where the schema says nothing.
    """

    of: Kind
    shortest: int = 0
    longest: int | None = None
    cap: int | None = None

    def read(self, value: object, what: str, pointer: str) -> Any:
        """As a tuple."""
        items = array(value, what, pointer, self.cap if self.longest is None else self.longest)
        if len(items) < self.shortest:
            raise InvalidData(f"{what} is empty", pointer)
        return tuple(self.of.read(item, f"{what}[{i}]", f"{pointer}/{i}") for i, item in enumerate(items))

    def schema(self) -> Schema:
        """The JSON Schema."""
        limits = {"minItems": self.shortest or None, "maxItems": self.longest}
        found = {key: limit for key, limit in limits.items() if limit is not None}
        return {"type": "array", "items": self.of.schema(), **found}


@dataclass(frozen=True)
class Column(Array):
    """An array of integers whose range and number are left to who makes an object of it, and knows what an index is."""

    of: Kind = field(default_factory=Integer)

    def read(self, value: object, what: str, pointer: str) -> Any:
        """As a tuple, or, where it has a cap, the column that it is."""
        if self.cap is not None:
            return column(value, what, pointer, self.cap)
        return integers(value, what, pointer, self.longest)


@dataclass(frozen=True)
class ColumnOfRows(Array):
    """An array of such arrays."""

    of: Column = field(default_factory=Column)

    def read(self, value: object, what: str, pointer: str) -> Any:
        """As tuples, or the rows that it is."""
        return integer_rows(value, what, pointer, self.cap, self.of.cap)


class Unread(Array):
    """An array whose entries are left to who makes an object of it."""

    def read(self, value: object, what: str, pointer: str) -> Any:
        """As it is."""
        return array(value, what, pointer, self.cap)


class Anything:
    """Any value."""

    def read(self, value: object, what: str, pointer: str) -> Any:
        """As it is."""
        return value

    def schema(self) -> Schema:
        """The JSON Schema."""
        return {}


class AnyObject:
    """Any object."""

    def read(self, value: object, what: str, pointer: str) -> Any:
        """As it is."""
        if not isinstance(value, Mapping):
            raise InvalidData(f"{what} must be an object, not {kind(value)}", pointer)
        return value

    def schema(self) -> Schema:
        """The JSON Schema."""
        return {"type": "object", "additionalProperties": True}


COMPONENTS = "#/components/schemas/"
"""Where OpenAPI keeps the schemas that others refer to."""


@dataclass(frozen=True)
class Nested:
    """A document inside another, or one of several.

    Attributes:
        documents: what the schema refers to; without any it says no more than that an object stands there.
        make: makes the object; by default the value is left to who knows more than its schema, such as its caps.
    """

    documents: tuple[Document, ...]
    make: Callable[[object], Any] = lambda value: value

    def read(self, value: object, what: str, pointer: str) -> Any:
        """What `make` makes of it; errors point into it."""
        try:
            return self.make(value)
        except InvalidData as error:
            raise error.under(pointer) from None

    def schema(self) -> Schema:
        """The JSON Schema: references to the documents."""
        references = [{"$ref": COMPONENTS + document.name} for document in self.documents]
        if not references:
            return AnyObject().schema()
        return references[0] if len(references) == 1 else {"anyOf": references}


_REQUIRED: Any = object()


@dataclass(frozen=True)
class Member:
    """One member of a document.

    Attributes:
        default: what an absent one means; without a default it is required.
        about: one sentence.
        nullable: whether null may stand in its place.
        local: in a local file only; no schema has it.
        sparse: left out where it has its default; others are always written.
    """

    kind: Kind
    default: Any = _REQUIRED
    about: str | None = None
    nullable: bool = False
    local: bool = False
    sparse: bool = False

    @property
    def required(self) -> bool:
        """Whether it must be there."""
        return self.default is _REQUIRED

    def read(self, value: object, what: str, pointer: str) -> Any:
        """The value, or None where null may stand."""
        return None if value is None and self.nullable else self.kind.read(value, what, pointer)

    def schema(self, name: str) -> Schema:
        """The JSON Schema under this name."""
        schema = self.kind.schema()
        if self.nullable:
            schema = {"anyOf": [schema, {"type": "null"}]}
        if not isinstance(self.kind, Nested) or len(self.kind.documents) != 1:
            schema["title"] = name.replace("_", " ").title()
        if not self.required:
            schema["default"] = list(self.default) if isinstance(self.default, tuple) else self.default
        if self.about is not None:
            schema["description"] = self.about
        return schema


@dataclass(frozen=True)
class Document:
    """A JSON object of known members.

    Attributes:
        name: of its schema.
        what: what its readers call it.
        about: one sentence.
        formats: what its member `format` may be; without any it has none.
        open: whether unknown members are ignored: what the service writes, a later version may say more in.
    """

    name: str
    what: str
    about: str
    members: dict[str, Member]
    formats: tuple[str, ...] = ()
    open: bool = False

    def read(self, data: object) -> dict[str, Any]:
        """The members that are there, each read; `data` may be the text.

        Raises:
            InvalidData: not an object, a missing or unknown member, another format, or a member that is refused.
        """
        data = parsed(data)
        required = [name for name, member in self.members.items() if member.required]
        known = data if self.open and isinstance(data, Mapping) else self.members
        found = members(data, self.what, required, known, self.formats[0] if self.formats else None)
        return {
            name: member.read(found[name], name, "/" + name) for name, member in self.members.items() if name in found
        }

    def write(self, of: object, *, local: bool = False) -> dict[str, Any]:
        """The JSON object of an object whose attributes are the members; `local` ones are for a local file."""
        found: dict[str, Any] = {"format": self.formats[0]} if self.formats else {}
        for name, member in self.members.items():
            value = getattr(of, name)
            if (local or not member.local) and not (member.sparse and value == member.default):
                found[name] = _written(value)
        return found

    @property
    def nested(self) -> list[Document]:
        """The documents that its schema refers to."""
        kinds = [member.kind for member in self.members.values()]
        return [document for kind in kinds if isinstance(kind, Nested) for document in kind.documents]

    def extended(self, name: str, about: str, /, **more: Member) -> Document:
        """This document under another name, with more members."""
        return replace(self, name=name, about=about, members={**self.members, **more})

    def schema(self) -> Schema:
        """The JSON Schema."""
        shown = {name: member for name, member in self.members.items() if not member.local}
        properties = {name: member.schema(name) for name, member in shown.items()}
        if self.open:  # what is absent is unknown: it has no default
            properties = {name: {k: v for k, v in one.items() if k != "default"} for name, one in properties.items()}
        required = [name for name, member in shown.items() if member.required]
        if self.formats:
            words: Schema = {"const": self.formats[0]} if len(self.formats) == 1 else {"enum": list(self.formats)}
            properties = {"format": {"title": "Format", "type": "string", **words}, **properties}
            required = ["format", *required]
        return {
            "title": self.name,
            "description": self.about,
            "type": "object",
            "properties": properties,
            "required": required,
            **({} if self.open else {"additionalProperties": False}),
        }


class OfDocument:
    """An object whose attributes are the members of its document."""

    document: ClassVar[Document]

    def __post_init__(self) -> None:
        """Refuse integers that the document refuses."""
        for name, member in self.document.members.items():
            if isinstance(member.kind, Integer):
                member.read(getattr(self, name), name, "/" + name)

    def to_json(self) -> dict[str, Any]:
        """The JSON object; what may be left out and has its default is not there."""
        return self.document.write(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object, or its text.

        Raises:
            InvalidData: malformed in any way; the message names key and index.
        """
        return cls(**cls.document.read(data))


def _written(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    if not isinstance(value, tuple):
        return value.to_json() if hasattr(value, "to_json") else value
    return [list(row) for row in value] if value and isinstance(value[0], tuple) else list(value)
