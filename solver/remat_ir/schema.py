"""How documents are read and described: what service and client may use of `read` and `document`.

A document is JSON with a `format` member. `document` declares its members and the values that they take, and `read`
turns text into checked values; the service makes its OpenAPI description from the same declarations.
"""

from .document import (
    COMPONENTS,
    AnyInteger,
    AnyObject,
    Array,
    Column,
    Document,
    Flag,
    Integer,
    Kind,
    Member,
    Nested,
    Number,
    Text,
)
from .read import LARGEST_INTEGER, Rows, array, escape, kind, length, length_of_rows, members, parse, refused_constant

__all__ = [
    "COMPONENTS",
    "LARGEST_INTEGER",
    "AnyInteger",
    "AnyObject",
    "Array",
    "Column",
    "Document",
    "Flag",
    "Integer",
    "Kind",
    "Member",
    "Nested",
    "Number",
    "Rows",
    "Text",
    "array",
    "escape",
    "kind",
    "length",
    "length_of_rows",
    "members",
    "parse",
    "refused_constant",
]
