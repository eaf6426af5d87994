"""Reading JSON that somebody else wrote: every refusal names the place.

A list of a million integers takes 40 MB, the text of it a few. So readers take columns of machine integers where they
take lists, in which the service reads long arrays: a large graph is refused, wherever it is wrong, before its tuples
are made.
"""

from __future__ import annotations

import json
from array import array as packed
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from .errors import InvalidData

LARGEST_INTEGER = 2**53
"""Integers above this do not survive a reader that holds numbers as doubles."""


class Rows(Sequence[Any]):
    """Rows of integers: all of them in order, and where each row ends among them."""

    def __init__(self, values: packed[int] | range, ends: packed[int]) -> None:
        self.values, self.ends = values, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        return self.values[self.ends[index - 1] if index else 0 : self.ends[index]]


Integers: TypeAlias = "tuple[int, ...] | packed[int] | range"
IntegerRows: TypeAlias = "tuple[tuple[int, ...], ...] | Rows"


def refused_constant(name: str) -> Any:
    """What JSON has no numbers for."""
    raise InvalidData(f"{name} is not a number that remat accepts")


def parse(
    text: str | bytes | bytearray,
    constant: Callable[[str], Any] = refused_constant,
    place: Callable[[int], tuple[int, int]] | None = None,
) -> Any:
    """Parse JSON text, refusing NaN, infinities and duplicate keys.

    Args:
        constant: what to make of NaN, Infinity and -Infinity.
        place: line and column of a character, where the text is a part of another.

    Raises:
        InvalidData: the text is not JSON; the message gives line and column.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise InvalidData(f"key {key!r} appears twice")
                seen.add(key)
        return found

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        line, column = (error.lineno, error.colno) if place is None else place(error.pos)
        raise InvalidData(f"not JSON: {error.msg} at line {line} column {column}") from None
    except UnicodeDecodeError as error:
        raise InvalidData(f"not JSON: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise InvalidData("not JSON that remat reads: nested too deeply") from None
    except ValueError as error:  # an integer literal of thousands of digits
        raise InvalidData(f"not JSON that remat reads: {error}") from None


def parsed(data: object) -> Any:
    """What a JSON text says; what is no text as it is."""
    return parse(data) if isinstance(data, (str, bytes)) else data


def members(
    data: object, what: str, required: Iterable[str], optional: Iterable[str] = (), format_name: str | None = None
) -> Mapping[str, Any]:
    """The members of an object that has all `required` keys and no unknown one.

    Raises:
        InvalidData: not an object, a missing or unknown key, another format.
    """
    if not isinstance(data, Mapping):
        raise InvalidData(f"{what} must be an object, not {kind(data)}")
    if format_name is not None and data.get("format") != format_name:
        raise InvalidData(f"{what} must have format {format_name!r}, not {data.get('format')!r}", "/format")
    known = {*required, *optional, *(("format",) if format_name else ())}
    for key in data:
        if key not in known:
            raise InvalidData(f"{what} has an unknown key {str(key)[:60]!r}", "/" + escape(str(key)[:60]))
    for key in required:
        if key not in data:
            raise InvalidData(f"{what} lacks the key {key!r}", "/" + key)
    return data


def integer(value: object, what: str, pointer: str, least: int = 0, most: int = LARGEST_INTEGER) -> int:
    """An integer within [least, most]; booleans and floats are refused, also 1.0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidData(f"{what} must be an integer, not {kind(value)}", pointer)
    if value < least:
        bound = "must not be negative" if least == 0 else f"must be at least {least}"
        raise InvalidData(f"{what} {bound}", pointer)
    if value > most:
        raise InvalidData(f"{what} must be at most {'2^53' if most == LARGEST_INTEGER else most}", pointer)
    return value


def array(value: object, what: str, pointer: str, longest: int | None = None) -> Sequence[Any]:
    """A JSON array of at most `longest` entries."""
    if not isinstance(value, _ARRAYS):
        raise InvalidData(f"{what} must be an array, not {kind(value)}", pointer)
    if longest is not None and len(value) > longest:
        raise InvalidData(f"{what} has {len(value)} entries, more than the {longest} allowed", pointer)
    return value


def integers(value: object, what: str, pointer: str, longest: int | None = None) -> tuple[int, ...]:
    """An array of integers; ranges are the caller's business."""
    return tuple(column(value, what, pointer, longest))


def column(value: object, what: str, pointer: str, longest: int | None = None) -> Integers:
    """The same, but for a column, which stays one."""
    items = array(value, what, pointer, longest)
    if isinstance(items, (packed, range)):
        return items
    if not _all_integers(items):
        i, item = next((i, item) for i, item in enumerate(items) if type(item) is not int)
        raise InvalidData(f"{what}[{i}] must be an integer, not {kind(item)}", f"{pointer}/{i}")
    return tuple(items)


def integer_rows(value: object, what: str, pointer: str, longest: int | None, longest_row: int | None) -> IntegerRows:
    """An array of arrays of integers; ranges are the caller's business."""
    rows = array(value, what, pointer, longest)
    if isinstance(rows, Rows):
        return rows
    plain = set(map(type, rows)) <= {list} and _all_integers(chain.from_iterable(rows))
    if plain and (longest_row is None or max(map(len, rows), default=0) <= longest_row):
        return tuple(map(tuple, rows))
    return tuple(integers(row, f"{what}[{i}]", f"{pointer}/{i}", longest_row) for i, row in enumerate(rows))


def length(value: object) -> int:
    """Entries of an array in whatever form it was parsed; 0 of anything else."""
    return len(value) if isinstance(value, _ARRAYS) else 0


def length_of_rows(value: object) -> int:
    """Entries of the arrays in an array together; what is no array counts nothing."""
    if isinstance(value, Rows):
        return len(value.values)
    if not isinstance(value, (list, tuple)):
        return 0
    return sum(map(len if set(map(type, value)) <= {list, tuple} else length, value))


def _all_integers(items: Iterable[object]) -> bool:
    return set(map(type, items)) <= {int}


_ARRAYS = (list, tuple, packed, range, Rows)


def kind(value: object) -> str:
    """What a JSON value is called in a message to a person."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return f"the float {value!r}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, _ARRAYS):
        return "an array"
    if isinstance(value, Mapping):
        return "an object"
    return type(value).__name__


def escape(key: str) -> str:
    """A key as one segment of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
