"""How documents are read and described: what service and client may use of `read`, `columns`, `document` and `kinds`.

A document is JSON with a `format` member. `document` declares its members, `kinds` the values that they take, and
`read` turns text into checked values; the service makes its OpenAPI description from the same declarations.
"""

from .columns import separate
from .document import COMPONENTS, Document, Member, Nested, OneOf, with_nested
from .kinds import AnyInteger, AnyObject, Array, Column, Dictionary, Flag, Integer, Number, Row, Text
from .read import LARGEST_INTEGER, array, kind, length, length_of_rows, members, parse, refused_constant

__all__ = [
    "COMPONENTS",
    "LARGEST_INTEGER",
    "AnyInteger",
    "AnyObject",
    "Array",
    "Column",
    "Dictionary",
    "Document",
    "Flag",
    "Integer",
    "Member",
    "Nested",
    "Number",
    "OneOf",
    "Row",
    "Text",
    "array",
    "kind",
    "length",
    "length_of_rows",
    "members",
    "parse",
    "refused_constant",
    "separate",
    "with_nested",
]
