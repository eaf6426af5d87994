"""Requests that may be one of several documents, and all that the description of the interface refers to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from remat_ir.document import Document, Nested


@dataclass(frozen=True)
class OneOf:
    """One of several documents, under a name of its own."""

    name: str
    about: str
    documents: tuple[Document, ...]

    def schema(self) -> dict[str, Any]:
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
