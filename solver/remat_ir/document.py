"""Documents of the wire, each declared once: what reads them, and the JSON Schema that describes them.

What needs more than one member, such as an index that must name an op, is checked by the object that is made of the
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .errors import InvalidData
from .kinds import AnyObject, Kind, Schema
from .read import members, parse

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
    """

    kind: Kind
    default: Any = _REQUIRED
    about: str | None = None
    nullable: bool = False
    local: bool = False

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
        if isinstance(data, (str, bytes)):
            data = parse(data)
        required = [name for name, member in self.members.items() if member.required]
        found = members(data, self.what, required, self.members, self.formats[0] if self.formats else None)
        return {
            name: member.read(found[name], name, "/" + name) for name, member in self.members.items() if name in found
        }

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


@dataclass(frozen=True)
class OneOf:
    """One of several documents, under a name of its own."""

    name: str
    about: str
    documents: tuple[Document, ...]

    def schema(self) -> Schema:
        """The JSON Schema."""
        return {"title": self.name, "description": self.about, **Nested(self.documents).schema()}


def with_nested(documents: Iterable[Document | OneOf]) -> dict[str, Document | OneOf]:
    """These documents and all that their schemas refer to, by name."""
    found: dict[str, Document | OneOf] = {}
    for document in documents:
        if document.name not in found:
            found[document.name] = document
            inner = document.documents if isinstance(document, OneOf) else document.nested
            found |= with_nested(inner)
    return found
